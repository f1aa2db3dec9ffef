"""How much memory there is."""

from __future__ import annotations

import os
from pathlib import Path

CGROUPS = (  # of version 2 and of version 1: limit, use
    ("/sys/fs/cgroup", "memory.max", "memory.current"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
KEPT_FILES = ("active_file", "inactive_file")  # counted as used, and given back when somebody needs it


def free_host_memory() -> int:
    """Bytes that this process may still take, by the machine and by the control group that it is in."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = 1024 * int(_table(meminfo)["MemAvailable:"].split()[0])
    for folder, limit, used in CGROUPS:
        if (path := Path(folder, limit)).is_file() and (most := path.read_text().strip()) != "max":
            kept = sum(int(value) for key, value in _table(Path(folder, "memory.stat")).items() if key in KEPT_FILES)
            free = min(free, int(most) - int(Path(folder, used).read_text()) + kept)
    return max(0, free)


def _table(path: Path) -> dict[str, str]:
    return dict(line.split(maxsplit=1) for line in path.read_text().splitlines())
