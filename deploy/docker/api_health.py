"""Whether the API in this container answers. For the HEALTHCHECK of a container.

Asks `/health`, which is true also while the store is away: a restart would not bring that back. Exit status 1: it does not,
and standard error says so.
"""

from __future__ import annotations

import http.client
import sys

from shared.settings import given


def main() -> int:
    client = http.client.HTTPConnection("127.0.0.1", given().port, timeout=4)
    try:
        client.request("GET", "/health")
        status = client.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        print(f"The API does not answer: {error}", file=sys.stderr)
        return 1
    finally:
        client.close()
    if status != 200:
        print(f"The API answers with {status}.", file=sys.stderr)
    return status != 200


if __name__ == "__main__":
    sys.exit(main())
