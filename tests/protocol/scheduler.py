"""Simulated time and threads: the product's own threads run as greenlets, one at a time, in an order that a seed decides.

A thread gives way only where it would block (an event, a lock, a queue, a sleep, the store), so a run can be repeated
exactly. Processes can be killed and stopped between any two of these points. Knows nothing of the store and of the
protocol.
"""

from __future__ import annotations

import collections
import contextlib
import heapq
import inspect
import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

#: What the wall clock shows at the start of a run, s.
EPOCH = 1_700_000_000.0


class SimProcess:
    """A process: threads that die and stop together."""

    def __init__(self, scheduler: Scheduler, name: str) -> None:
        self.scheduler = scheduler
        self.name = name
        self.dead = False
        self.stopped = False
        #: When it last went on after a stop.
        self.continued_at = 0.0
        #: Its longest absence by a stop or a cut network, s.
        self.longest_stop = 0.0
        #: What it sends arrives no earlier: its network is cut until then.
        self.cut_off_until = 0.0
        #: Each of its commands takes up to so long, s, on its own connection.
        self.lag = 0.0
        self.threads: list[SimThread] = []
        self._held_back: list[Callable[[], None]] = []

    def spawn(self, target: Callable[[], object], name: str = "") -> SimThread:
        thread = SimThread(self, target, name)
        self.threads.append(thread)
        self.scheduler.at(0, lambda: self.scheduler.resume(thread, True))
        return thread

    def kill(self) -> None:
        """As kill -9: what it has sent is on its way, nothing else of it ever happens."""
        if self.dead:
            return
        self.dead = True
        self._held_back.clear()
        self.scheduler.at(0, self._bury)

    def exit_now(self, *_: object) -> None:
        """The same, from within."""
        self.kill()
        raise GreenletExit

    def stop(self, seconds: float) -> None:
        """As SIGSTOP, and SIGCONT after `seconds`."""
        self.stopped = True
        self.longest_stop = max(self.longest_stop, seconds)
        self.scheduler.at(seconds, self._go_on)

    def cut_off(self, seconds: float) -> None:
        """Nothing gets through for so long; what was sent meanwhile arrives then."""
        self.longest_stop = max(self.longest_stop, seconds)
        self.cut_off_until = self.scheduler.now + seconds

    def slow_down(self, seconds: float, lag: float) -> None:
        self.lag = lag

        def fast() -> None:
            self.lag = 0.0

        self.scheduler.at(seconds, fast)

    def _go_on(self) -> None:
        if self.dead:
            return
        self.stopped = False
        self.continued_at = self.scheduler.now
        held, self._held_back = self._held_back, []
        for action in held:
            self.scheduler.at(0, action)

    def hold_back(self, action: Callable[[], None]) -> None:
        self._held_back.append(action)

    def _bury(self) -> None:
        for thread in self.threads:
            if thread.body and not thread.body.dead:
                thread.body.throw(GreenletExit)


class SimThread:
    def __init__(self, process: SimProcess, target: Callable[[], object], name: str) -> None:
        self.process = process
        self.name = name
        self.body = greenlet(self._run)
        #: Counts blocks: a wake-up for an earlier one is void.
        self.block = 0
        self.over = False
        self._target = target

    def _run(self, *_: object) -> None:
        if self.process.dead:
            return
        try:
            self._target()
        except GreenletExit:
            pass
        except Exception as error:
            self.process.scheduler.thread_died(self, error)
        finally:
            self.over = True


class Scheduler:
    """`now`: s since the start. `say` gets a line for everything that matters to a reader of the trace."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 1.0
        self._events: list[tuple[float, float, int, Callable[[], None]]] = []
        self._count = 0
        self._loop = getcurrent()
        self.threads: dict[greenlet, SimThread] = {}
        self.deaths: list[tuple[SimThread, Exception]] = []
        self.trace: list[str] | None = None

    def say(self, *words: object) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.now:8.3f} " + " ".join(map(str, words)))

    def at(self, delay: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + max(0.0, delay), self.rng.random(), self._count, action))

    def run(self, until: Callable[[], bool], limit: float) -> bool:
        """Until `until()`, looked at after each event; False: `limit` came first."""
        while self._events:
            if until():
                return True
            when, _, _, action = heapq.heappop(self._events)
            if when > limit:
                return False
            self.now = when
            action()
        return until()

    def close(self) -> None:
        self._events.clear()

    def thread_died(self, thread: SimThread, error: Exception) -> None:
        self.say("THREAD DIED", thread.process.name, thread.name, repr(error))
        self.deaths.append((thread, error))

    # -- within a thread

    @property
    def current(self) -> SimThread:
        return self.threads[getcurrent()]

    @property
    def process(self) -> SimProcess:
        return self.current.process

    def block(self, timeout: float | None = None) -> bool:
        """Gives way until somebody wakes this thread: True; False after `timeout` s."""
        thread = self.current
        if thread.process.dead:
            raise GreenletExit
        thread.block += 1
        block = thread.block
        if timeout is not None:
            self.at(timeout, lambda: self.wake(thread, block, False))
        woken: bool = self._loop.switch()
        return woken

    def sleep(self, seconds: float) -> None:
        self.block(seconds)

    def wake_soon(self, thread: SimThread, block: int) -> None:
        self.at(0, lambda: self.wake(thread, block, True))

    def wake(self, thread: SimThread, block: int, value: bool) -> None:
        if thread.block == block:
            thread.block += 1
            self.resume(thread, value)

    def resume(self, thread: SimThread, value: bool) -> None:
        process = thread.process
        if process.dead or thread.over:
            return
        if process.stopped:
            process.hold_back(lambda: self.resume(thread, value))
            return
        self.threads[thread.body] = thread
        thread.body.switch(value)
        if thread.over:
            self.threads.pop(thread.body, None)


class Waiters:
    """Threads that wait for the same thing."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._waiting: list[tuple[SimThread, int]] = []

    def wait(self, timeout: float | None) -> bool:
        thread = self._scheduler.current
        self._waiting.append((thread, thread.block + 1))
        return self._scheduler.block(timeout)

    def wake_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for thread, block in waiting:
            self._scheduler.wake_soon(thread, block)


class SimEvent:
    def __init__(self, scheduler: Scheduler) -> None:
        self._set = False
        self._scheduler = scheduler
        self._waiters = Waiters(scheduler)

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._waiters.wake_all()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        until = None if timeout is None else self._scheduler.now + timeout
        while not self._set:
            left = None if until is None else until - self._scheduler.now
            if left is not None and left <= 0:
                break
            if not self._waiters.wait(left):
                break
        return self._set


class SimLock:
    def __init__(self, scheduler: Scheduler) -> None:
        self._held = False
        self._waiters = Waiters(scheduler)

    def __enter__(self) -> None:
        while self._held:
            self._waiters.wait(None)
        self._held = True

    def __exit__(self, *_: object) -> None:
        self._held = False
        self._waiters.wake_all()


class SimCondition(SimLock):
    """`notify` wakes all: who waits looks again."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self._notified = Waiters(scheduler)

    def wait(self, timeout: float | None = None) -> bool:
        self.__exit__()
        woken = self._notified.wait(timeout)
        self.__enter__()
        return woken

    def notify(self) -> None:
        self._notified.wake_all()


class SimQueue:
    def __init__(self, scheduler: Scheduler) -> None:
        self._items: collections.deque[Any] = collections.deque()
        self._waiters = Waiters(scheduler)

    def put(self, item: object) -> None:
        self._items.append(item)
        self._waiters.wake_all()

    def get(self) -> Any:
        while not self._items:
            self._waiters.wait(None)
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items


def patches(scheduler: Scheduler) -> Iterator[tuple[object, str, object]]:
    """(where, name, what) to put in place of time and threads in every module of ours that uses them."""

    class StartedThread:
        def __init__(self, target: Callable[..., object], args: tuple[object, ...] = (), name: str = "", **_: object):
            self._target, self._args, self._name = target, args, name

        def start(self) -> None:
            self._thread = scheduler.process.spawn(lambda: self._target(*self._args), self._name)

        def join(self, timeout: float | None = None) -> None:
            join(self._thread, timeout)

    def join(thread: SimThread, timeout: float | None) -> None:
        until = scheduler.now + (1e9 if timeout is None else timeout)
        while not thread.over and scheduler.now < until:
            scheduler.sleep(0.05)

    def start(self: Any) -> None:
        self.sim_thread = scheduler.process.spawn(self.run, self.name)

    def join_own(self: Any, timeout: float | None = None) -> None:
        join(self.sim_thread, timeout)

    class NoPool:
        """Runs what it gets at once."""

        def __init__(self, *_: object) -> None:
            pass

        def submit(self, what: Callable[..., object], *args: object) -> None:
            what(*args)

        def shutdown(self) -> None:
            pass

    def monotonic() -> float:
        return scheduler.now

    threads = SimpleNamespace(
        Event=lambda: SimEvent(scheduler),
        Lock=lambda: SimLock(scheduler),
        Condition=lambda: SimCondition(scheduler),
        Thread=StartedThread,
    )
    clocks = SimpleNamespace(
        monotonic=monotonic,
        perf_counter=monotonic,
        time=lambda: EPOCH + scheduler.now,
        sleep=scheduler.sleep,
    )
    queues = SimpleNamespace(SimpleQueue=lambda: SimQueue(scheduler))
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] not in ("api", "workers", "shared"):
            continue
        for name, value in list(vars(module).items()):
            if value is threading:
                yield module, name, threads
            elif value is time:
                yield module, name, clocks
            elif value is queue:
                yield module, name, queues
            elif value is ThreadPoolExecutor:
                yield module, name, NoPool
            elif inspect.isclass(value) and value.__module__ == module_name:
                if issubclass(value, threading.Thread):
                    yield value, "start", start
                    yield value, "join", join_own
                for function in vars(value).values():
                    defaults = getattr(function, "__kwdefaults__", None) or {}
                    for parameter, default in defaults.items():
                        if default is time.monotonic:
                            yield function, "__kwdefaults__", {**defaults, parameter: monotonic}


@contextlib.contextmanager
def patched(changes: list[tuple[Any, str, object]]) -> Iterator[None]:
    """Everything as before at the end."""
    missing = object()
    before = [
        (where, name, vars(where).get(name, missing) if inspect.isclass(where) else getattr(where, name))
        for where, name, _ in changes
    ]
    try:
        for where, name, what in changes:
            setattr(where, name, what)
        yield
    finally:
        for where, name, value in before:
            if value is missing:
                delattr(where, name)
            else:
                setattr(where, name, value)
