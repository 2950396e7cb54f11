"""Lists in the store, newest or oldest first, a page at a time: files and batches. Knows their ids alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from shared.errors import InvalidRequest

#: Ids read at once.
PAGE = 200

T = TypeVar("T")


def page(
    store: Any,
    index: str,
    read: Callable[[list[str]], list[T | None]],
    *,
    after: str | None,
    limit: int,
    ascending: bool = False,
    wanted: Callable[[T], bool] = lambda item: True,
) -> tuple[list[T], bool]:
    """(the `limit` items behind `after` that are wanted, whether there are more). `read`: ids to what they stand for,
    None for those that are gone, which leave the index.

    Raises InvalidRequest if `after` is not in it, and redis.RedisError."""
    found: list[T] = []
    gone: list[str] = []
    for ids in _pages(store, index, after, ascending):
        items = read(ids)
        gone += [item_id for item_id, item in zip(ids, items, strict=True) if item is None]
        found += [item for item in items if item is not None and wanted(item)]
        if len(found) > limit:
            break
    if gone:  # only now: the next page begins behind one of them
        store.zrem(index, *gone)
    return found[:limit], len(found) > limit


def _pages(store: Any, index: str, after: str | None, ascending: bool) -> Iterator[list[str]]:
    while True:
        start = 0
        if after is not None:
            rank = store.zrank(index, after) if ascending else store.zrevrank(index, after)
            if rank is None:
                raise InvalidRequest(f"after is no id of this list: {after[:64]!a}.", param="after")
            start = rank + 1
        names = store.zrange(index, start, start + PAGE - 1, desc=not ascending)
        if not names:
            return
        ids = [name.decode(errors="replace") for name in names]
        yield ids
        after = ids[-1]
