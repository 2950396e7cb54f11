"""`python -m api`: one API node, set up by the settings.

gevent patches the standard library here, before anything else is imported, and nowhere else.
"""

from __future__ import annotations

from gevent import monkey

monkey.patch_all()

import argparse  # noqa: E402
import sys  # noqa: E402

import structlog  # noqa: E402

from api.server import serve  # noqa: E402
from shared import logs  # noqa: E402
from shared.exposure import Exposed  # noqa: E402
from shared.parent import die_with_parent  # noqa: E402
from shared.settings import WrongSettings, given  # noqa: E402
from shared.store_rules import StoreRefused, check_store  # noqa: E402

log = structlog.get_logger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Serves until it is told to stop. Exit status 2: it could not start, and said what to do."""
    parser = argparse.ArgumentParser(prog="python -m api", description="One API node.")
    parser.add_argument("--host", help="address to listen on")
    parser.add_argument("--port", type=int, help="port to listen on")
    parser.add_argument("--api-workers", type=int, help="processes")
    parser.add_argument("--insecure", action="store_true", default=None, help="listen beyond loopback without API keys")
    options = parser.parse_args(argv)
    die_with_parent()
    try:
        settings = given(**vars(options))
        if not settings.redis_url:
            raise StoreRefused("No store is configured: set REDIS_URL, or use `sluice up`, which starts one.")
        logs.configure(settings.log_level, settings.log_format, process="api")
        for warning in check_store(settings.redis_url):
            log.warning("store", message=warning)
        serve(settings)
    except (WrongSettings, StoreRefused, Exposed) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
