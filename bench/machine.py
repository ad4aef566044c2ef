"""What a measurement was made on, and with what."""

import os
import platform
import re
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("torch", "triton", "numba", "numpy", "transformers", "grpcio", "protobuf")
_CPU_INFO = Path("/proc/cpuinfo")
_CPU_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_CACHE_SIZE = re.compile(r"(\d+)([KM])")
_DEFAULT_CACHE_BYTES = 32 << 20


def describe_machine(device: torch.device) -> dict[str, Any]:
    """JSON values: device, versions, date (UTC)."""
    described: dict[str, Any] = {
        "device": device_name(device),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "num_cpus": len(os.sched_getaffinity(0)),
        "architecture": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "versions": _versions(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        described |= {
            "cuda": torch.version.cuda,
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
        }
    return described


def device_name(device: torch.device) -> str:
    """As the device, or the CPU, calls itself."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")


def slug(name: str) -> str:
    """`NVIDIA H100 80GB HBM3` → `nvidia-h100-80gb-hbm3`."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "unknown"


def cache_bytes(device: torch.device) -> int:
    """Of the last cache before the device's memory."""
    if device.type == "cuda":
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
