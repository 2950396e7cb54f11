"""Work that would hold up all requests of a gevent process, in a real thread. Knows nothing of the work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import gevent
from gevent import monkey

T = TypeVar("T")


def greenlets() -> bool:
    """Whether the requests of this process share one thread."""
    return bool(monkey.is_module_patched("threading"))


def in_real_thread(work: Callable[[], T], pool: Any = None) -> T:
    """The result of `work`; in a thread of `pool` (default: gevent's own) where greenlets share this one."""
    if not greenlets():
        return work()
    result, error = (pool or gevent.get_hub().threadpool).apply(_caught, (work,))
    if error is not None:
        raise error
    return cast(T, result)


def _caught(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """gevent prints what a pool's thread raises, and here that is a client's mistake most of the time."""
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001 - raised again by the caller
        return None, error
