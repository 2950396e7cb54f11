"""The store's failures as the error that a client gets."""

from __future__ import annotations

import redis

from shared.errors import StoreUnavailable


class reaching_the_store:
    """A context in which a store that does not answer raises StoreUnavailable."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, redis.RedisError):
            raise StoreUnavailable("The store does not answer.") from error
