"""Processes as an outsider sees them, from /proc: whose session, which command, alive or only not reaped yet."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def in_session(session: int) -> dict[int, str]:
    """pid -> command line of every process of a session that still runs; zombies do not."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            # proc(5): after the command's closing parenthesis come state, ppid, pgrp, session
            state, _, _, of = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[:4]
            if int(of) == session and state not in ("Z", "X"):
                raw = (folder / "cmdline").read_bytes()
                found[int(folder.name)] = raw.replace(b"\0", b" ").decode(errors="replace").strip()
    return found


def alive(pid: int) -> bool:
    """Whether it runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def end(session: int) -> None:
    """What a failed test left behind."""
    for pid in in_session(session):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)
