"""`python -m api`: one API node, set up by the settings.

gevent patches the standard library here, before anything else is imported, and nowhere else.
"""

from __future__ import annotations

from gevent import monkey

monkey.patch_all()

import logging  # noqa: E402

import structlog  # noqa: E402

from api.server import serve  # noqa: E402
from shared.settings import Settings  # noqa: E402


def main() -> None:
    settings = Settings()
    if not settings.redis_url:
        raise SystemExit("No store is configured: set REDIS_URL, or use `sluice up`, which starts one.")
    level = logging.getLevelNamesMapping()[settings.log_level]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(level))
    serve(settings)


if __name__ == "__main__":
    main()
