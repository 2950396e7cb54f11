"""A supervisor over stub children, for tests/faults/test_supervisor.py: `python -m tests.faults.stub_stack CHILD...`.

Each child is a way to be hard to end. They are told apart by their last argument, which is in their command line.
"""

from __future__ import annotations

import os
import sys
import threading
import time

from scripts.child import Program
from scripts.supervisor import Supervisor

#: One write, which stays whole when two processes share the pipe; print() may make two of it.
_FOREVER = "import os, time\nos.write(1, b'up\\n')\nwhile True: time.sleep(60)\n"
_DEAF = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
_NO_DEATH_SIGNAL = "import ctypes\nctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\n"
_WATCH = "from shared.parent import die_with_parent\ndie_with_parent()\n"
_FORK = "import os\nmaster = os.fork() > 0\n"

STUBS = {
    "plain": _FOREVER,
    "deaf": _DEAF + _FOREVER,
    # the pipe alone must do it
    "pipe-only": _DEAF + _WATCH + _NO_DEATH_SIGNAL + _FOREVER,
    "pipe-only-gevent": "from gevent import monkey\nmonkey.patch_all()\n"
    + _DEAF
    + _WATCH
    + _NO_DEATH_SIGNAL
    + _FOREVER,
    # like gunicorn: the child's own child was not started by the supervisor
    "forking": _DEAF + _FORK + _WATCH + _FOREVER,
    "forking-left-alone": _FORK + "if master: os._exit(3)\n" + _FOREVER,
    "slow": "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *a: (time.sleep(0.5), print('drained'), sys.exit(0)))\n"
    + _FOREVER,
    "failing": "import sys\nsys.exit('no such model')\n",
    "failing-once": "import os, sys\np = os.environ['STUB_FILE']\nif not os.path.exists(p): open(p, 'w').close(); sys.exit(7)\n"
    + _FOREVER,
    "store": _FOREVER,
    "missing": "",
}


def program(kind: str) -> Program:
    command = ["/no/such/program"] if kind == "missing" else [sys.executable, "-c", STUBS[kind], "stub", kind]
    role = "store" if kind == "store" else "worker"
    return Program(kind, role, lambda run: [*command, run])


_saying = threading.Lock()


def say(line: str) -> None:
    """Whole lines, also from several threads at once: print() writes the text and the line's end apart."""
    with _saying:
        print(f"{time.monotonic():.3f} up {line}", flush=True)


def main(kinds: list[str]) -> None:
    drain = float(os.environ.get("STUB_DRAIN_S", "5"))
    hooks = {"on_worker_exit": lambda name, pid, how: say(f"dead {name} {pid}")}
    programs = [program(kind) for kind in kinds]
    with Supervisor(programs, say=say, hear=lambda n, line: say(f"{n}: {line}"), drain_s=drain, **hooks) as supervisor:
        supervisor.run()


if __name__ == "__main__":
    main(sys.argv[1:])
