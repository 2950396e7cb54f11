"""`create_app()`: the only place where the parts of the API are wired together."""

from __future__ import annotations

from flask import Flask

from api import edge, errors
from api.edge import Edge
from api.gateway import Gateway
from api.lifecycle import Lifecycle
from api.relay.hub import Hub
from api.relay.watcher import Watcher
from api.routes import completions, health, models, reference, status, tokens
from api.services import EXTENSION, Services
from api.templating import Renderer
from api.thinking import Tails
from api.tokenizers import Tokenizers
from shared import connection
from shared.settings import Settings


def create_app(
    settings: Settings | None = None,
    *,
    gateway: Gateway | None = None,
    hub: Hub | None = None,
    watcher: Watcher | None = None,
    lifecycle: Lifecycle | None = None,
) -> Flask:
    """The WSGI application of one process, made after the fork.

    Without `gateway` and `hub` it connects to the store at `settings.redis_url` and starts following it. `watcher`
    notices clients that hang up; without one (in tests) nobody does.
    """
    settings = settings or Settings()
    if gateway is None or hub is None:
        gateway, hub = _follow_store(settings)
    lifecycle = lifecycle or Lifecycle()
    app = Flask("sluice", static_folder=None)
    app.config["PROVIDE_AUTOMATIC_OPTIONS"] = False
    app.url_map.merge_slashes = False
    app.url_map.redirect_defaults = False
    renderer = Renderer()
    app.extensions[EXTENSION] = Services(
        settings,
        gateway,
        hub,
        watcher,
        lifecycle,
        tokenizers=Tokenizers(gateway.tokenizer),
        renderer=renderer,
        tails=Tails(renderer.render_all),
    )
    for module in (completions, models, tokens, health, status, reference):
        app.register_blueprint(module.blueprint)
    errors.install(app)
    edge.install(app, settings)
    app.wsgi_app = Edge(app.wsgi_app, lifecycle)  # type: ignore[method-assign]
    return app


def _follow_store(settings: Settings) -> tuple[Gateway, Hub]:
    if not settings.redis_url:
        raise ValueError("No store is configured: set SLUICE_REDIS_URL or REDIS_URL.")
    gateway = Gateway(connection.connect(settings.redis_url), settings)
    hub = Hub(settings.redis_url, gateway.proc, store_wait=settings.store_wait_s, lost=gateway.end_if_abandoned)
    hub.start()
    gateway.start(hub.following)
    return gateway, hub
