"""How much memory this machine has left for a run."""

from __future__ import annotations

from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")


def available_bytes(cgroup: Path = CGROUP) -> int:
    """What can be allocated without swapping: of the machine, or of the control group (a container) if that has less.

    Args:
        cgroup: of version 2, or the folder that has `memory/` of version 1.
    """
    available = psutil.virtual_memory().available
    for folder, limit, used, cache in (
        (cgroup, "memory.max", "memory.current", "inactive_file"),
        (cgroup / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        if (folder / limit).exists() and (most := (folder / limit).read_text().strip()) != "max":
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().strip().splitlines())
            free = int(most) - int((folder / used).read_text()) + int(stat.get(cache, 0))  # file pages are given back
            available = min(available, free)
    return max(available, 0)
