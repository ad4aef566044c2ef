"""Measures the memory that is free on the device, or in the container that this process runs in."""

from pathlib import Path

import psutil
import torch

_CGROUP_V2 = Path("/sys/fs/cgroup")
_CGROUP_V1 = Path("/sys/fs/cgroup/memory")


def free_memory_bytes(device: torch.device) -> int:
    """Returns the bytes that can be allocated on `device` now, including memory that torch has only cached."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return free_bytes
    host_bytes = psutil.virtual_memory().available
    left_bytes = cgroup_free_bytes(_CGROUP_V2, _CGROUP_V1)
    return host_bytes if left_bytes is None else min(host_bytes, left_bytes)


def cgroup_free_bytes(v2: Path, v1: Path) -> int | None:
    """Returns the bytes left under the control group's limit, reclaimable file pages included; None without a limit."""
    for limit_file, usage_file, prefix in (
        (v2 / "memory.max", v2 / "memory.current", ""),
        (v1 / "memory.limit_in_bytes", v1 / "memory.usage_in_bytes", "total_"),
    ):
        try:
            limit, usage = limit_file.read_text().strip(), int(usage_file.read_text())
            stat = (limit_file.parent / "memory.stat").read_text()
        except (OSError, ValueError):
            continue
        if limit == "max":
            return None
        pages = dict(line.split() for line in stat.splitlines())
        # Weights that were read twice, as after a restart, are on the active list: the system reclaims them too.
        reclaimable = sum(int(pages.get(f"{prefix}{kind}_file", "0")) for kind in ("inactive", "active"))
        return max(0, int(limit) - usage + reclaimable)
    return None
