"""Free host memory; without torch, for processes that must not import it yet."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> tuple[int, str]:
    """Free host memory, and the file that says so: the machine's or the control group's, whichever is less."""
    limits = []
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                limits.append((int(line.split()[1]) * 1024, str(meminfo)))
    # https://docs.kernel.org/admin-guide/cgroup-v2.html: memory.current counts the page cache, which can be dropped.
    limit, current, stat = (CGROUP / name for name in ("memory.max", "memory.current", "memory.stat"))
    if limit.exists() and (text := limit.read_text(encoding="ascii").strip()) != "max":
        used = int(current.read_text(encoding="ascii")) - _file_cache_bytes(stat)
        limits.append((int(text) - max(0, used), str(limit)))
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(limits, default=(pages, "sysconf"))


def _file_cache_bytes(stat: Path) -> int:
    rows = (line.split() for line in stat.read_text(encoding="ascii").splitlines())
    return sum(int(value) for name, value in rows if name in ("inactive_file", "active_file"))
