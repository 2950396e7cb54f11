"""Whether the worker in this container is alive: it holds a lease in the store. For the HEALTHCHECK of a container.

A worker whose engine gets nowhere ends itself (SLUICE_STALL_S), and its lease with it. Exit status 1: there is none, and
standard error says so.
"""

from __future__ import annotations

import socket
import sys

from redis.exceptions import RedisError

from shared import connection, keys
from shared.settings import given


def main() -> int:
    url = given().redis_url
    if not url:
        print("REDIS_URL is not set.", file=sys.stderr)
        return 1
    # A worker's name begins with its host's, which is the container's own.
    mine = f"{socket.gethostname()}-"
    store = connection.connect(url, max_connections=1)
    try:
        names = [name.decode() for name in store.smembers(keys.WORKERS)]
        alive = any(store.exists(keys.lease(name)) for name in names if name.startswith(mine))
    except RedisError as error:
        print(f"The store does not answer: {error}", file=sys.stderr)
        return 1
    if not alive:
        print("The worker holds no lease.", file=sys.stderr)
    return not alive


if __name__ == "__main__":
    sys.exit(main())
