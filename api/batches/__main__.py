"""`python -m api.batches`: a batch runner, set up by the settings.

Until there is something to do it is small: what a runner needs is imported when the store has the first file, batch or
webhook.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading

import redis
import structlog

from shared import connection, keys, logs
from shared.parent import die_with_parent
from shared.settings import Settings, WrongSettings, given
from shared.store_rules import StoreRefused, check_store

log = structlog.get_logger(__name__)

#: Seconds between two looks for something to do.
LOOK = 1.0


def main(argv: list[str] | None = None) -> int:
    """Runs batches until it is told to stop. Exit status 2: it could not start, and said what to do."""
    argparse.ArgumentParser(
        prog="sluice batch runner", description="Runs batches until it is told to stop."
    ).parse_args(argv)
    die_with_parent()
    try:
        settings = given()
        if not settings.redis_url:
            raise StoreRefused("No store is configured: set REDIS_URL, or use `sluice up`, which starts one.")
        logs.configure(settings.log_level, settings.log_format, process="batches")
        for warning in check_store(settings.redis_url):
            log.warning("store", message=warning)
    except (WrongSettings, StoreRefused) as error:
        print(error, file=sys.stderr)
        return 2
    _run(settings, settings.redis_url)
    return 0


def _run(settings: Settings, url: str) -> None:
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    store = connection.connect(url, max_connections=64)
    while not _something_to_do(store):
        if stopping.wait(LOOK):
            return
    from api.batches.runner import Runner

    log.info("runner_ready")
    Runner(store, settings, stopping).run()


def _something_to_do(store: redis.Redis) -> bool:
    try:
        return bool(store.exists(keys.BATCHES_OPEN, keys.FILES_EXPIRE, keys.HOOKS))
    except redis.RedisError as error:
        log.warning("store_away", error=str(error))
        return False


if __name__ == "__main__":
    sys.exit(main())
