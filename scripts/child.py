"""One process that the supervisor keeps alive: how it starts, dies with its parent, speaks, ends and starts again.

Knows nothing of what the process does; `scripts/supervisor.py` decides when to call what.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

from shared.parent import PARENT_FD, set_death_signal

#: Wait before a child that ended is started again, s: doubled each time up to the last, back to the first once it was well.
FIRST_WAIT_S, LAST_WAIT_S = 0.2, 10.0
#: A child that lived this long was well, s.
HEALTHY_S = 30.0
#: A child that ends this soon, this often in a row, is not going to work by itself.
BOOT_S, BOOT_TRIES = 10.0, 3

Kind = Literal["store", "api", "runner", "worker"]


@dataclass
class Program:
    """What to run. `command` gets the name of this one run, which is new at each start.

    `keep_fds`: descriptors the process inherits besides the supervisor's pipe. `folder`: where it runs. `wanted`: from the
    start; else once somebody wants it.
    """

    name: str
    kind: Kind
    command: Callable[[str], Sequence[str]]
    env: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None
    keep_fds: tuple[int, ...] = ()
    wanted: bool = True


@dataclass(frozen=True)
class Ended:
    """How one run of a child ended. `status` is -N for signal N; `wait_s`: until it may start again; `asked`: it had been
    asked to end."""

    run_name: str
    pid: int
    status: int
    lived_s: float
    wait_s: float
    asked: bool

    @property
    def how(self) -> str:
        if self.status < 0:
            with contextlib.suppress(ValueError):
                return f"signal {signal.Signals(-self.status).name}"
        return f"exit status {self.status}"

    def __str__(self) -> str:
        return f"pid {self.pid} ended with {self.how} after {self.lived_s:.1f} s"


class Child:
    """A program and its current process, if any.

    `parent_fd`: reading end of the supervisor's pipe. `hear(name, line)` gets each line of output, from a thread.
    `wanted`: whether there should be one; `last_end`: of its last process. Both may be looked at from other threads, and
    `wanted` be set.
    """

    def __init__(
        self,
        program: Program,
        parent_fd: int,
        hear: Callable[[str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.program = program
        self.wanted = program.wanted
        self.last_end: Ended | None = None
        #: When its process was asked to end.
        self.asked: float | None = None
        self.quick_ends = 0
        self.next_start = 0.0
        self.run_name = program.name
        self._parent_fd = parent_fd
        self._hear = hear
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        #: When its process was started, by the clock.
        self.started = 0.0
        self._wait_s = FIRST_WAIT_S
        self._last_lines: deque[str] = deque(maxlen=5)
        self._listener: threading.Thread | None = None

    @property
    def name(self) -> str:
        return self.program.name

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def last_lines(self) -> list[str]:
        return list(self._last_lines)

    def start(self) -> int:
        """Starts the process and returns its pid. Call from the main thread, which the death signal follows.

        It gets a process group of its own in our session: a Ctrl-C reaches only the supervisor, which ends its
        children in order. Raises OSError if the command cannot be run.
        """
        self.run_name = f"{self.name}-{secrets.token_hex(4)}"
        command = list(self.program.command(self.run_name))
        parent = os.getpid()

        def between_fork_and_exec() -> None:
            set_death_signal()
            if os.getppid() != parent:  # it died before the line above
                os._exit(1)

        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **self.program.env, PARENT_FD: str(self._parent_fd)},
            cwd=self.program.folder,
            pass_fds=(self._parent_fd, *self.program.keep_fds),
            preexec_fn=between_fork_and_exec,
            process_group=0,
        )
        assert process.stdout is not None
        self._process, self.started, self.asked = process, self._clock(), None
        self._last_lines.clear()
        self._listener = threading.Thread(
            target=self._listen, args=(process.stdout,), daemon=True, name=f"hear {self.name}"
        )
        self._listener.start()
        return process.pid

    def ended(self) -> Ended | None:
        """Reaps the process if it ended, with all that is left of its process group; None while it runs or if none does."""
        process = self._process
        if process is None:
            return None
        # Looked at first without reaping: as long as the leader is not reaped, the group's number cannot be another's.
        if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            return None
        self._signal_group(signal.SIGKILL)
        status = process.wait()
        if self._listener is not None:
            self._listener.join(1.0)  # its last words; a grandchild that left the group may hold the pipe longer
        self._process = None
        lived, asked = self._clock() - self.started, self.asked is not None
        if lived >= HEALTHY_S or asked:
            self._wait_s = FIRST_WAIT_S
        self.quick_ends = self.quick_ends + 1 if lived < BOOT_S and not asked else 0
        wait = 0.0
        if not asked:
            wait, self._wait_s = self._wait_s, min(self._wait_s * 2, LAST_WAIT_S)
        self.next_start = self._clock() + wait
        self.last_end = Ended(self.run_name, process.pid, status, lived, wait, asked)
        return self.last_end

    def put_off(self) -> float:
        """The process could not be started at all: counts like one that ended at once. Returns the wait, s."""
        self.quick_ends += 1
        wait, self._wait_s = self._wait_s, min(self._wait_s * 2, LAST_WAIT_S)
        self.next_start = self._clock() + wait
        return wait

    def ask_to_end(self) -> None:
        """SIGTERM to the process alone: it tells its own children."""
        if self._process is not None:
            self.asked = self._clock()
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to the process and its group."""
        if self._process is not None:
            self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _listen(self, output: IO[bytes]) -> None:
        with output:
            for raw in output:
                line = raw.decode("utf-8", errors="replace").rstrip("\r\n")
                if line.strip():
                    self._last_lines.append(line)
                self._hear(self.name, line)
