"""`python -m tests.older_worker` is `python -m workers` as of job version 1: it leaves alone what asks for more."""

from __future__ import annotations

import sys

from shared import scripts
from workers.__main__ import main

if __name__ == "__main__":
    scripts.VERSION = 1
    sys.exit(main())
