"""`python -m scripts.batch_runner`: the batch runner under a name of its own, so that nobody who looks for API
processes by their command lines (`python -m api`) finds it among them."""

from __future__ import annotations

import sys

from api.batches.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
