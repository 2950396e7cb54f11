"""`python -m tests.older_api` is `python -m api` whose jobs lack the fields that workers of version 1 may overlook."""

from __future__ import annotations

import sys

from api.__main__ import main  # first: it has gevent patch the standard library

from api import submission  # isort: skip

if __name__ == "__main__":
    submission._traced = lambda job: job
    sys.exit(main())
