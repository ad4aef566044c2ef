"""Describes the machine of a measurement: its device and software versions. Loads torch only to find GPUs."""

import os
import platform
import re
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_PACKAGES = ("torch", "triton", "numba", "numpy", "transformers", "grpcio", "protobuf")
_CPU_INFO = Path("/proc/cpuinfo")
_CPU_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_CACHE_SIZE = re.compile(r"(\d+)([KM])")
_DEFAULT_CACHE_BYTES = 32 << 20


def local_device() -> "torch.device | None":
    """Returns the GPU if torch is installed and finds one, else None, which stands for the CPU."""
    try:
        import torch
    except ImportError:
        return None
    return torch.device("cuda") if torch.cuda.is_available() else None


def describe_machine(device: "torch.device | None") -> dict[str, Any]:
    """Returns device, versions and date (UTC) as JSON values. None is the CPU."""
    described: dict[str, Any] = {
        "device": device_name(device),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "num_cpus": len(os.sched_getaffinity(0)),
        "architecture": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "versions": _versions(),
    }
    if device is not None and device.type == "cuda":
        import torch

        properties = torch.cuda.get_device_properties(device)
        described |= {
            "cuda": torch.version.cuda,
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
        }
    return described


def device_name(device: "torch.device | None") -> str:
    """Returns the name that the device, or the CPU, reports."""
    if device is not None and device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")


def slug(name: str) -> str:
    """Turns `NVIDIA H100 80GB HBM3` into `nvidia-h100-80gb-hbm3`."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "unknown"


def cache_bytes(device: "torch.device") -> int:
    """Returns the size of the last-level cache of the device."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    found = [_CACHE_SIZE.match(path.read_text(encoding="utf-8")) for path in _CPU_CACHES.glob("index*/size")]
    sizes = [int(size[1]) << {"K": 10, "M": 20}[size[2]] for size in found if size]
    return max(sizes, default=_DEFAULT_CACHE_BYTES)


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
