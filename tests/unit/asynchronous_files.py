"""The file store on an asynchronous file system in a process that gevent has patched, as the API has it with S3: run by
test_file_store.py. Prints how many of 40 greenlets at once have read back what they wrote, how many files there are, in
how many threads the file system's loop ran, and whether the greenlets' own was among them.

fsspec keeps the loop of such file systems in a thread; see `_loop_of_its_own` in api/file_store.py for what gevent
makes of that.
"""

from __future__ import annotations

from gevent import monkey

monkey.patch_all()

import asyncio  # noqa: E402
from typing import Any  # noqa: E402

import fsspec  # noqa: E402
import gevent  # noqa: E402
from fsspec.asyn import AsyncFileSystem  # noqa: E402
from fsspec.spec import AbstractBufferedFile  # noqa: E402

from api.file_store import FileStore  # noqa: E402

STORED: dict[str, bytes] = {}
#: Threads of the system in which the loop has run.
THREADS: set[int] = set()
ident = monkey.get_original("_thread", "get_ident")


class SlowFiles(AsyncFileSystem):
    """Each call takes a moment, on the loop."""

    protocol = "slow"

    async def _pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        THREADS.add(ident())
        await asyncio.sleep(0.05)
        STORED[path] = value

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        await asyncio.sleep(0.05)
        if path not in STORED:
            raise FileNotFoundError(path)
        return STORED[path][start:end]

    async def _rm_file(self, path: str, **_: Any) -> None:
        del STORED[path]

    def _open(self, path: str, mode: str = "rb", **_: Any) -> SlowFile:
        return SlowFile(self, path, mode)


class SlowFile(AbstractBufferedFile):
    def _initiate_upload(self) -> None:
        self.parts: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        self.parts.append(self.buffer.getvalue())
        if final:
            self.fs.pipe_file(self.path, b"".join(self.parts))
        return True


def main() -> None:
    fsspec.register_implementation("slow", SlowFiles)
    files = FileStore("slow://place")

    def use(number: int) -> bytes:
        files.put(f"files/{number}", b"%d" % number * 1000)
        return b"".join(files.read(f"files/{number}", 0, 4))

    running = [gevent.spawn(use, number) for number in range(40)]
    gevent.joinall(running, timeout=30, raise_error=True)
    print(
        sum(one.value == (b"%d" % n * 4)[:4] for n, one in enumerate(running)),
        len(STORED),
        len(THREADS),
        ident() in THREADS,
    )


if __name__ == "__main__":
    main()
