"""How many cores an engine may keep busy on this machine. Knows nothing of engines."""

from __future__ import annotations

import os
from pathlib import Path


def usable_cores(cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores this process may use: its affinity, capped by the container's CPU quota (cgroup v2).

    More threads than cores would spend their time waiting for each other at every layer's barrier.
    """
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = cpu_max.read_text().split()[:2]
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup v2, or "max": no quota
        return cores
