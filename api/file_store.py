"""The bytes of uploaded files and of batches' results, wherever fsspec can put them: a folder, or S3 and its like.

Names are ours alone (`files/file-...`), never a client's. Every call may come from a greenlet: the waiting is done in
real threads. What a file is, whose, and for how long is in `api/file_records.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import fsspec
import structlog
from gevent import monkey
from gevent.threadpool import ThreadPool

from api.real_thread import greenlets, in_real_thread
from shared.errors import StoreUnavailable
from shared.settings import Settings

log = structlog.get_logger(__name__)

#: Bytes read at once.
BLOCK = 1024 * 1024
#: Threads of one process in which greenlets' calls are made.
THREADS = 16

T = TypeVar("T")


class FileStore:
    """`url`: a folder, or an address that fsspec knows; `options`: for its file system. Connects on first use.

    Methods raise FileNotFoundError for a name that is not there, and StoreUnavailable for any other failure."""

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self._url = url
        self._options = dict(options or {})

    @classmethod
    def of(cls, settings: Settings) -> FileStore:
        """The one that the settings name."""
        return cls(settings.files_url or str((settings.data_dir / "files").absolute()), settings.files_options)

    def create(self, name: str) -> NewFile:
        """Begins a file; what has that name is replaced when it is finished."""
        path = self._path(name)

        def opened() -> Any:
            self._fs.makedirs(self._fs._parent(path), exist_ok=True)
            return self._fs.open(path, "wb")

        return NewFile(self._reach, self._reach(opened), lambda: self.remove([name]))

    def put(self, name: str, data: bytes) -> None:
        """A whole file at once."""
        with self.create(name) as new:
            new.write(data)

    def read(self, name: str, start: int, end: int) -> Iterator[bytes]:
        """The bytes from `start` to before `end`, in blocks; fewer if the file is shorter."""
        path = self._path(name)
        while start < end:
            stop = min(start + BLOCK, end)
            block: bytes = self._reach(partial(self._fs.cat_file, path, start=start, end=stop))
            if block:
                yield block
            if len(block) < stop - start:  # the end; object stores refuse a range behind it (RFC 9110 section 15.5.17)
                return
            start = stop

    @contextlib.contextmanager
    def opened(self, name: str, size: int) -> Iterator[BinaryIO]:
        """The file of `size` bytes, to be read from any place; one that is elsewhere is copied here first."""
        if self._local:
            with self._reach(lambda: Path(self._path(name)).open("rb")) as file:
                yield file
            return
        with tempfile.TemporaryFile() as copy:
            for block in self.read(name, 0, size):
                copy.write(block)
            copy.seek(0)
            yield copy

    def remove(self, names: Iterable[str]) -> None:
        """Removes files; those that are not there are no matter."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._reach(partial(self._fs.rm_file, self._path(name)))

    def remove_folder(self, name: str) -> None:
        """Removes all that lies below a name."""
        with contextlib.suppress(FileNotFoundError):
            self._reach(lambda: self._fs.rm(self._path(name), recursive=True))

    def changed(self, folder: str) -> dict[str, float]:
        """name -> when it was last changed, s since 1970, of every file below the folder."""
        root = self._path("")
        found = self._reach(lambda: self._fs.find(self._path(folder), detail=True))
        return {path[len(root) :].lstrip("/"): _changed(about) for path, about in found.items()}

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _reach(self, work: Callable[[], T]) -> T:
        try:
            _ = self._fs  # made here, where greenlets take turns, and not by several threads at once
            return in_real_thread(work, self._pool)
        except FileNotFoundError:
            raise
        except Exception as error:
            log.error("file_store_failed", exc_info=error)
            raise StoreUnavailable("The file store does not answer, or is full.") from None

    @cached_property
    def _pool(self) -> Any:
        return ThreadPool(THREADS) if greenlets() else None

    @cached_property
    def _fs(self) -> Any:
        fsspec_class = fsspec.get_filesystem_class(fsspec.core.split_protocol(self._url)[0] or "file")
        options = dict(self._options)
        if fsspec_class.async_impl:
            options |= {"use_listings_cache": False, "skip_instance_cache": True}
            if greenlets():
                options["loop"] = _loop_of_its_own()
        return fsspec_class(**options)

    @cached_property
    def _root(self) -> str:
        return str(self._fs._strip_protocol(self._url)).rstrip("/")

    @property
    def _local(self) -> bool:
        return fsspec.core.split_protocol(self._url)[0] in (None, "file")


class NewFile:
    """A file that is being written, `size` bytes so far. As a context manager it is finished, or on an error
    discarded."""

    def __init__(self, reach: Callable[[Callable[[], Any]], Any], file: Any, remove: Callable[[], None]) -> None:
        self.size = 0
        self._reach, self._file, self._remove = reach, file, remove

    def write(self, data: bytes) -> None:
        self._reach(lambda: self._file.write(data))
        self.size += len(data)

    def finish(self) -> None:
        """The file is there, and stays there if the machine loses its power."""

        def finished() -> None:
            if isinstance(self._file, fsspec.implementations.local.LocalFileOpener):
                self._file.flush()
                os.fsync(self._file.fileno())
            self._file.close()

        self._reach(finished)

    def discard(self) -> None:
        """As if it had never been begun. Never raises."""

        def discarded() -> None:
            if isinstance(self._file, fsspec.spec.AbstractBufferedFile):
                self._file.discard()
                self._file.closed = True  # or its finaliser would write it after all
            else:
                self._file.close()

        with contextlib.suppress(StoreUnavailable):
            self._reach(discarded)
            self._remove()

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.discard()


def _loop_of_its_own() -> asyncio.AbstractEventLoop:
    """An event loop in a real thread, for fsspec's asynchronous file systems (S3).

    fsspec would start a thread for its loop, of which gevent makes a greenlet: what the loop computes would hold up all
    others, and fsspec refuses to wait for a loop in its own thread (fsspec 2026.9, `fsspec.asyn.sync`)."""
    made: list[asyncio.AbstractEventLoop] = []
    there = monkey.get_original("_thread", "allocate_lock")()
    there.acquire()

    def run() -> None:
        made.append(asyncio.new_event_loop())
        asyncio.set_event_loop(made[0])
        there.release()
        made[0].run_forever()

    monkey.get_original("_thread", "start_new_thread")(run, ())
    there.acquire()
    return made[0]


def _changed(about: Mapping[str, Any]) -> float:
    """As a local folder and S3 say it; now, so to speak, where it is not said."""
    for name in ("mtime", "LastModified", "created"):
        value = about.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return float("inf")
