"""Brings webhooks from the store to their targets, and again, later each time, until they arrive or three days are
over.

Runs in the batch runner's process. Any number of couriers work on one store: one that is being sent is due again only
after a while, so if its courier dies, another sends it. A receiver may therefore get an event twice; its id is the same
then.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import msgspec
import redis
import structlog

from api.webhooks import sending, targets
from api.webhooks.sending import NotDelivered
from shared.scripts import Scripts
from shared.settings import Settings

log = structlog.get_logger(__name__)

#: Sent at one time; and how long one that is being sent is nobody else's, s.
AT_ONCE, UNDER_WAY = 8, 60.0
#: Seconds between two looks.
LOOK = 0.5
#: Pause before the second try, s; four times as long each time, up to the longest.
FIRST, FACTOR, LONGEST = 5.0, 4, 6 * 3600.0


class Event(NamedTuple):
    """`about`: id of what ended; `created`: when, s; `tries`: this one included."""

    id: str
    url: str
    kind: str
    about: str
    created: int
    tries: int

    def body(self) -> bytes:
        return msgspec.json.encode(
            {
                "id": self.id,
                "object": "event",
                "type": self.kind,
                "created_at": self.created,
                "data": {"id": self.about},
            }
        )


class Courier(threading.Thread):
    """Works until `stopping` is set."""

    def __init__(self, store: redis.Redis, settings: Settings, stopping: threading.Event) -> None:
        super().__init__(name="courier", daemon=True)
        self._scripts = Scripts(store)
        self._settings = settings
        self._stopping = stopping
        self._free = threading.Semaphore(AT_ONCE)

    def run(self) -> None:
        with ThreadPoolExecutor(AT_ONCE, "webhook") as threads:
            while not self._stopping.wait(LOOK):
                try:
                    for event in self._due():
                        threads.submit(self._bring, event)
                except redis.RedisError as error:
                    log.warning("webhooks_not_looked_for", error=str(error))
                except Exception:
                    log.exception("webhooks_not_looked_for")

    def _due(self) -> list[Event]:
        """As many as there are threads for, of those whose time has come."""
        room = 0
        while room < AT_ONCE and self._free.acquire(blocking=False):
            room += 1
        found: list[Any] = []
        try:
            found = self._scripts.call("hooks", room, int(UNDER_WAY * 1000)) if room else []
        finally:
            for _ in range(room - len(found)):
                self._free.release()
        return [
            Event(event_id.decode(), url.decode(), kind.decode(), about.decode(), int(created), int(tries))
            for event_id, url, kind, about, created, tries in found
        ]

    def _bring(self, event: Event) -> None:
        try:
            again = self._try(event)
            self._scripts.call("hook_done", event.id, "" if again is None else int(again * 1000))
        except redis.RedisError as error:  # it will be due again
            log.warning("webhook_not_booked", event_id=event.id, error=str(error))
        except Exception:
            log.exception("webhook_failed", event_id=event.id)
        finally:
            self._free.release()

    def _try(self, event: Event) -> float | None:
        """Sends it; None if that is all, else seconds until the next try."""
        settings, target = self._settings, targets.parse(event.url)
        # the list may have become shorter since it was accepted
        if target is None or not settings.webhook_secret or not targets.allowed(target, settings.webhook_targets):
            log.warning("webhook_not_allowed", event_id=event.id)
            return None
        try:
            sending.send(target, event.id, event.body(), settings.webhook_secret, private=settings.webhook_private)
        except NotDelivered as error:
            pause = min(FIRST * FACTOR ** min(event.tries - 1, 20), LONGEST)
            log.warning("webhook_not_delivered", event_id=event.id, tries=event.tries, why=str(error), gone=error.gone)
            return None if error.gone else pause
        log.info("webhook_delivered", event_id=event.id, tries=event.tries)
        return None
