"""TCP ports of this machine: is one free, and if not, who has it. Knows nothing of what listens there."""

from __future__ import annotations

import contextlib
import errno
import socket
from pathlib import Path

_LISTEN = "0A"


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now. Raises OSError for another reason than "in use": not this machine's address,
    no such host, no right to use the port."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def any_free(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def owner(port: int) -> str | None:
    """`pid 12 (python -m http.server)` for whoever listens on the port; None if that cannot be seen."""
    inodes = _listening_inodes(port)
    if not inodes:
        return None
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(descriptor.readlink()) in inodes:
                        command = (
                            (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                        )
                        return f"pid {process.name} ({command[:100]})"
    return None


def _listening_inodes(port: int) -> set[str]:
    """Socket names (`socket:[1234]`) listening on the port, from proc(5)."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(f"socket:[{fields[9]}]")
    return found
