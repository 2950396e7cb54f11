"""What the routes work with: the parts that `create_app` wired, one set per process."""

from __future__ import annotations

from dataclasses import dataclass

from flask import Flask, current_app

from api.auth import Gate
from api.batches.records import BatchRecords
from api.chat_prompt import ChatPrompts
from api.constraints import Constraints
from api.file_records import FileRecords
from api.file_store import FileStore
from api.gateway import Gateway
from api.lifecycle import Lifecycle
from api.limits import Limits
from api.metrics import Metrics
from api.monitor import Monitor
from api.pages import Asset
from api.recent import Recent
from api.relay.grace import Graces
from api.relay.hub import Hub
from api.relay.watcher import Watcher
from api.telling import Teller
from api.templating import Renderer
from api.tokenizers import Tokenizers
from shared.counts import Counts
from shared.settings import Settings
from shared.tracing import Tracer

#: Their name among the app's extensions.
EXTENSION = "sluice"


@dataclass(frozen=True, slots=True)
class Services:
    """`watcher` is None where there are no sockets to watch (tests), `teller` where there is no store."""

    settings: Settings
    gateway: Gateway
    hub: Hub
    watcher: Watcher | None
    lifecycle: Lifecycle
    graces: Graces
    tokenizers: Tokenizers
    renderer: Renderer
    chats: ChatPrompts
    constraints: Constraints
    limits: Limits
    gate: Gate
    files: FileStore
    file_records: FileRecords
    batches: BatchRecords
    assets: dict[str, Asset]
    counts: Counts
    metrics: Metrics
    monitor: Monitor
    recent: Recent
    teller: Teller | None
    tracer: Tracer

    def close(self, *, left_behind: bool) -> None:
        """At the end of the process. `left_behind`: requests run on for clients that come back on another node, so
        the process must be found dead rather than sign off."""
        self.renderer.close()
        self.constraints.close()
        self.hub.stop()
        if self.teller is not None:
            self.teller.stop()
        if not (left_behind or self.graces.kept()):
            self.gateway.leave()
        self.tracer.close()


def services() -> Services:
    """The services of the app that handles the current request."""
    return services_of(current_app)


def services_of(app: Flask) -> Services:
    found: Services = app.extensions[EXTENSION]
    return found
