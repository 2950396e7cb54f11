"""A process that the supervisor started ends when the supervisor does, also on kill -9.

Two nets: PR_SET_PDEATHSIG, which the supervisor sets before exec and which is set once more here (fork clears it, so
gunicorn's workers call this too), and a pipe whose writing end only the supervisor holds: it reaches EOF whatever
ended the supervisor. Does nothing in a process that was started by hand. Knows nothing of what the process does.
"""

from __future__ import annotations

import _thread
import ctypes
import os
import signal
import stat
import sys
from collections.abc import Callable

#: Environment variable: number of the inherited descriptor, the reading end of the supervisor's pipe.
PARENT_FD = "SLUICE_PARENT_FD"

#: From <linux/prctl.h>.
PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Call at the start of a process, from its main thread, and again after a fork (the watching thread is not inherited).

    The signal follows the *thread* that started this process: that thread must live as long as its process.
    """
    descriptor = _supervisors_pipe()
    if descriptor is None:
        return
    set_death_signal()
    _start_thread(_end_at_eof, (descriptor,))


def set_death_signal() -> None:
    """The kernel sends SIGKILL to this process when the thread that started it ends. Silent where that is not offered."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _supervisors_pipe() -> int | None:
    try:
        descriptor = int(os.environ[PARENT_FD])
        return descriptor if stat.S_ISFIFO(os.fstat(descriptor).st_mode) else None
    except (KeyError, ValueError, OSError):
        return None


def _end_at_eof(descriptor: int) -> None:
    try:
        while os.read(descriptor, 1):
            pass
    except OSError:
        return
    os._exit(1)


def _start_thread(function: Callable[[int], None], args: tuple[int]) -> None:
    """A real thread, also where gevent has replaced threads by greenlets: the read blocks for the process's whole life."""
    monkey = sys.modules.get("gevent.monkey")
    start = monkey.get_original("_thread", "start_new_thread") if monkey is not None else _thread.start_new_thread
    start(function, args)
