"""`create_app()`: the only place where the parts of the API are wired together."""

from __future__ import annotations

import redis
from flask import Flask

from api import edge, errors, pages
from api.auth import Gate
from api.batches.records import BatchRecords
from api.chat_prompt import ChatPrompts
from api.constraints import Constraints
from api.edge import Edge
from api.file_records import FileRecords
from api.file_store import FileStore
from api.gateway import Gateway
from api.keyring import Keyring
from api.lifecycle import Lifecycle
from api.limits import Limits
from api.metrics import Metrics
from api.monitor import Monitor
from api.recent import Recent
from api.relay.grace import Graces
from api.relay.hub import Hub
from api.relay.watcher import Watcher
from api.routes import (
    batches,
    chat,
    completions,
    health,
    jobs,
    metrics,
    models,
    monitor,
    reference,
    sockets,
    status,
    tokens,
)
from api.routes import files as files_routes
from api.routes import pages as pages_routes
from api.services import EXTENSION, Services
from api.telling import Teller
from api.templating import Renderer
from api.thinking import Shapes
from api.tokenizers import Tokenizers
from shared import connection
from shared.api_keys import KeyStore
from shared.counts import Counts
from shared.settings import Settings
from shared.tracing import make_tracer


def create_app(
    settings: Settings | None = None,
    *,
    gateway: Gateway | None = None,
    hub: Hub | None = None,
    watcher: Watcher | None = None,
    lifecycle: Lifecycle | None = None,
    keyring: Keyring | None = None,
    limits: Limits | None = None,
    store: redis.Redis | None = None,
) -> Flask:
    """The WSGI application of one process, made after the fork.

    Without `gateway` and `hub` it connects to the store at `settings.redis_url` and starts following it. `watcher`
    notices clients that hang up; without one (in tests) nobody does. With a `gateway` but no `keyring` and `limits`
    there are no API keys, and without `store` no files and batches.
    """
    settings = settings or Settings()
    ours = gateway is None or hub is None
    if gateway is None or hub is None:
        store = _connect(settings)
        gateway, hub, graces, keyring, limits = _follow_store(settings, store)
    else:
        graces = _graces(gateway, hub)
    lifecycle = lifecycle or Lifecycle()
    app = Flask("sluice", static_folder=None)
    app.config["PROVIDE_AUTOMATIC_OPTIONS"] = False
    app.url_map.merge_slashes = False
    app.url_map.redirect_defaults = False
    app.config["SOCK_SERVER_OPTIONS"] = sockets.options(settings)
    assets = pages.assets()
    counts, recent = Counts(store), Recent(store, settings)
    teller = None
    if ours:
        teller = Teller(counts, recent, lambda: hub.repaired)
        teller.start()
    gate = Gate(settings, keyring or Keyring(None), assets)
    renderer = Renderer()
    files = FileStore.of(settings)
    tracer = make_tracer("sluice-api")
    tokenizers = Tokenizers(gateway.tokenizer)
    app.extensions[EXTENSION] = Services(
        settings,
        gateway,
        hub,
        watcher,
        lifecycle,
        graces,
        tokenizers=tokenizers,
        renderer=renderer,
        chats=ChatPrompts(renderer, Shapes(renderer.render_all), tokenizers),
        constraints=Constraints(),
        limits=limits or Limits(None),
        gate=gate,
        files=files,
        file_records=FileRecords(store, files),
        batches=BatchRecords(store, settings.lease_s),
        assets=assets,
        counts=counts,
        metrics=Metrics(store, gateway, counts),
        monitor=Monitor(store, gateway, counts),
        recent=recent,
        teller=teller,
        tracer=tracer,
    )
    resources = (completions, chat, jobs, files_routes, batches, sockets, models, tokens, health, status, reference)
    for module in (*resources, metrics, monitor, pages_routes):
        app.register_blueprint(module.blueprint)
    app.register_blueprint(jobs.chat_blueprint)
    errors.install(app)
    edge.install(app, settings, gate, counts, tracer)
    app.wsgi_app = Edge(app.wsgi_app, lifecycle)  # type: ignore[method-assign]
    return app


def _connect(settings: Settings) -> redis.Redis:
    if not settings.redis_url:
        raise ValueError("No store is configured: set SLUICE_REDIS_URL or REDIS_URL.")
    return connection.connect(settings.redis_url)


def _follow_store(settings: Settings, store: redis.Redis) -> tuple[Gateway, Hub, Graces, Keyring, Limits]:
    assert settings.redis_url
    gateway = Gateway(store, settings)
    hub = Hub(settings.redis_url, gateway.proc, store_wait=settings.store_wait_s, lost=gateway.end_if_abandoned)
    graces = _graces(gateway, hub)
    hub.start()
    gateway.start(lambda: hub.following() | graces.kept())
    return gateway, hub, graces, Keyring(KeyStore(store)), Limits(store)


def _graces(gateway: Gateway, hub: Hub) -> Graces:
    def let_go(job_id: str) -> None:
        if job_id not in hub.following():
            gateway.detach(job_id)

    return Graces(let_go)
