"""`python -m api`: one API node, set up by the settings.

gevent patches the standard library here, before anything else is imported, and nowhere else.
"""

from __future__ import annotations

from gevent import monkey

monkey.patch_all()

import structlog  # noqa: E402

from api.server import serve  # noqa: E402
from shared import logs  # noqa: E402
from shared.parent import die_with_parent  # noqa: E402
from shared.settings import Settings  # noqa: E402
from shared.store_rules import StoreRefused, check_store  # noqa: E402


def main() -> None:
    die_with_parent()
    settings = Settings()
    if not settings.redis_url:
        raise SystemExit("No store is configured: set REDIS_URL, or use `sluice up`, which starts one.")
    logs.configure(settings.log_level, process="api")
    try:
        for warning in check_store(settings.redis_url):
            structlog.get_logger(__name__).warning("store", message=warning)
    except StoreRefused as error:
        raise SystemExit(str(error)) from None
    serve(settings)


if __name__ == "__main__":
    main()
