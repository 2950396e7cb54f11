"""The thread of an API process that tells the store, once a second, what was counted and which requests ended here."""

from __future__ import annotations

import threading
from collections.abc import Callable

import redis
import structlog

from api.recent import Recent
from shared.counts import Counts

log = structlog.get_logger(__name__)

#: Seconds between two tellings: so much of its counts does a killed process take with it.
PAUSE = 1.0


class Teller(threading.Thread):
    """`repaired`: how many gaps in streams were filled since the process began."""

    def __init__(self, counts: Counts, recent: Recent, repaired: Callable[[], int]) -> None:
        super().__init__(name="teller", daemon=True)
        self._counts = counts
        self._recent = recent
        self._repaired = repaired
        self._counted = 0
        self._stopping = threading.Event()

    def run(self) -> None:
        while not self._stopping.wait(PAUSE):
            self.tell()

    def stop(self) -> None:
        """Tells the rest."""
        self._stopping.set()
        self.tell()

    def tell(self) -> None:
        try:
            if new := self._repaired() - self._counted:
                self._counted += new
                self._counts.add("gap_repairs", by=new)
            self._counts.tell()
            self._recent.write()
        except redis.RedisError as error:
            log.debug("counts_not_told", error=str(error))
        except Exception:
            log.exception("counts_not_told")
