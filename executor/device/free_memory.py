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
    for limit_file, usage_file, inactive_key in (
        (v2 / "memory.max", v2 / "memory.current", "inactive_file"),
        (v1 / "memory.limit_in_bytes", v1 / "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit, usage = limit_file.read_text().strip(), int(usage_file.read_text())
            stat = (limit_file.parent / "memory.stat").read_text()
        except (OSError, ValueError):
            continue
        if limit == "max":
            return None
        reclaimable = dict(line.split() for line in stat.splitlines()).get(inactive_key, "0")
        return max(0, int(limit) - usage + int(reclaimable))
    return None
