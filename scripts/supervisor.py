"""Keeps the processes of one machine alive and ends them in order: `sluice up`'s main loop.

It knows programs, not what they do: `scripts/up.py` says which. Children die with this process whatever ends it
(`shared/parent.py`), and one that ends is started again, later each time if it keeps ending.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from scripts.child import BOOT_TRIES, Child, Ended, Program

#: What a process that drains may need beyond `drain_s` to hand over and leave, s.
HAND_OVER_S = 5.0
#: The same for the store, which has to write its file, s.
STORE_STOP_S = 10.0

#: Gets the run's name, the pid and the way it ended of a worker that has been waited for: it is dead, beyond doubt.
OnWorkerExit = Callable[[str, int, str], None]


class Supervisor:
    """Starts `programs` in their order, restarts what ends, and on SIGTERM, SIGINT or SIGHUP ends all, the store last.

    `say(line)` is the supervisor's own log, `hear(name, line)` the children's output (called from threads).
    `drain_s`: how long API and workers may finish what they run. A second signal ends the wait.
    Use it as a context manager, from the main thread: the death signal of the children follows the thread.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        *,
        say: Callable[[str], None],
        hear: Callable[[str, str], None],
        drain_s: float = 30.0,
        on_worker_exit: OnWorkerExit | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say = say
        self._drain_s = drain_s
        self._on_worker_exit = on_worker_exit
        self._clock = clock
        self._signals: list[int] = []
        # Held open by this process alone (close-on-exec), so that its death is the end of file of `_parent_read`.
        self._parent_read, self._parent_write = os.pipe()
        self._wake_read, self._wake_write = os.pipe()
        for end in (self._wake_read, self._wake_write):
            os.set_blocking(end, False)
        self.children = [Child(program, self._parent_read, hear, clock) for program in programs]

    def __enter__(self) -> Supervisor:
        stop_on = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup
            stop_on.append(signal.SIGHUP)
        self._old_handlers = {number: signal.signal(number, self._on_signal) for number in stop_on}
        self._old_handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self._old_wakeup = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        return self

    def __exit__(self, *error: object) -> None:
        for child in self.children:
            child.kill()
        for child in self.children:
            while child.pid is not None and child.ended() is None:
                self._sleep(0.1)
        signal.set_wakeup_fd(self._old_wakeup)
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        for end in (self._parent_read, self._parent_write, self._wake_read, self._wake_write):
            with contextlib.suppress(OSError):
                os.close(end)

    @property
    def stopping(self) -> bool:
        return bool(self._signals)

    def start(self, child: Child) -> bool:
        """Starts one child; False, with a line in the log, if its command cannot be run."""
        try:
            pid = child.start()
        except OSError as error:
            wait = child.put_off()
            self._say(f"{child.name} cannot be started ({error}); next try in {wait:.1f} s")
            return False
        self._say(f"{child.name} started, pid {pid}")
        return True

    def still_running(self, child: Child) -> bool:
        """Whether a child that was just started is still there; never restarts. For waiting at boot."""
        return not self.stopping and child.pid is not None and not _has_ended(child.pid)

    def run(self) -> None:
        """Looks after the children until a signal asks to stop, then ends them. Children not yet started are started."""
        while not self.stopping:
            for child in self.children:
                self._look_after(child)
            due = [child.next_start for child in self.children if child.pid is None and child.wanted]
            self._sleep(min([1.0, *(max(0.0, at - self._clock()) for at in due)]))
        self.stop()

    def stop(self) -> None:
        """Ends API and workers (SIGTERM, then SIGKILL), then the store. Children that are idle end at once."""
        others = [c for c in self.children if c.program.kind != "store" and c.pid is not None]
        if others:
            self._say(
                f"stopping: {', '.join(c.name for c in others)}; running requests have up to {self._drain_s:g} s, "
                "Ctrl-C again ends them now"
            )
        self._end(others, self._drain_s + HAND_OVER_S)
        self._end([c for c in self.children if c.program.kind == "store" and c.pid is not None], STORE_STOP_S)

    def wake(self) -> None:
        """From any thread: what is wanted has changed."""
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"\0")

    def _look_after(self, child: Child) -> None:
        if child.pid is None:
            if child.wanted and self._clock() >= child.next_start:
                self.start(child)
            return
        ended = child.ended()
        if ended is None:
            self._dismiss(child)
            return
        again = f"; starting it again in {ended.wait_s:.1f} s" if child.wanted and not ended.asked else ""
        self._say(f"{child.name}: {ended}{again}")
        if child.quick_ends >= BOOT_TRIES:
            self._say_prominently(child)
        self._report(child, ended)

    def _dismiss(self, child: Child) -> None:
        """Ends one that is not wanted any more, with the same patience as when all end."""
        if child.wanted:
            return
        if child.asked is None:
            self._say(f"{child.name} is not needed any more")
            child.ask_to_end()
        elif self._clock() >= child.asked + self._drain_s + HAND_OVER_S:
            child.kill()

    def _say_prominently(self, child: Child) -> None:
        self._say(f"!!! {child.name} has ended {child.quick_ends} times in a row soon after its start. Its last words:")
        for line in _last_words(child):
            self._say(f"!!!   {line}")

    def _report(self, child: Child, ended: Ended) -> None:
        if child.program.kind != "worker" or self._on_worker_exit is None:
            return
        try:
            self._on_worker_exit(child.run_name, ended.pid, ended.how)
        except Exception as error:  # noqa: BLE001 - the hook is a shortcut; the leases do the same, later
            self._say(f"{child.name}: cannot be reported as dead ({error}); its lease will run out")

    def _end(self, children: list[Child], patience_s: float) -> None:
        for child in children:
            child.ask_to_end()
        asked, give_up = len(self._signals), self._clock() + patience_s
        left = children
        while left := [child for child in left if not self._gone(child)]:
            if self._clock() >= give_up or len(self._signals) > asked:
                why = "asked again" if len(self._signals) > asked else f"not gone after {patience_s:.0f} s"
                self._say(f"{why}: killing " + ", ".join(child.name for child in left))
                asked, give_up = len(self._signals), self._clock() + patience_s
                for child in left:
                    child.kill()
            self._sleep(min(0.5, max(0.01, give_up - self._clock())))

    def _gone(self, child: Child) -> bool:
        ended = child.ended()
        if ended is not None:
            self._say(f"{child.name}: {ended}")
            self._report(child, ended)
        return child.pid is None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _sleep(self, seconds: float) -> None:
        """Until a signal comes (a child that ended is one), at most `seconds`."""
        select.select([self._wake_read], [], [], seconds)
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake_read, 512):
                pass


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def _last_words(child: Child) -> Iterator[str]:
    yield from child.last_lines[-3:] or ["(it said nothing)"]
