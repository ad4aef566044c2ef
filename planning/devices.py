"""Devices and their properties, from the vendor's data sheets.

H100  NVIDIA H100 Tensor Core GPU datasheet, column SXM: 80 GB, 3.35 TB/s, 989 TFLOP/s bfloat16 and float16 without
      sparsity (printed as 1,979 with it), 67 TFLOP/s float32, NVLink 900 GB/s (both directions together)
H200  NVIDIA H200 Tensor Core GPU datasheet, column SXM: 141 GB, 4.8 TB/s, the same TFLOP/s and NVLink
A100  NVIDIA A100 Tensor Core GPU datasheet, column 80GB SXM: 80 GB, 2,039 GB/s, 312 TFLOP/s, 19.5 float32, NVLink
      600 GB/s

GB and TB are decimal, as in the data sheets. Drivers report a little more memory than the sheets.
"""

import re
from dataclasses import dataclass

from planning.errors import PlanningError

_MAX_BYTES = 1e15


@dataclass(frozen=True, slots=True)
class Device:
    """The properties of one device.

    memory_bytes     size of its memory
    bandwidth        bytes per second from its memory
    flops_16_bit     dense FLOPs per second of matrix products in bfloat16 and float16
    flops_32_bit     FLOPs per second of matrix products in float32
    link_bandwidth   bytes per second that it can send to the other devices of its node, in one direction
    """

    name: str
    memory_bytes: int
    bandwidth: float
    flops_16_bit: float
    flops_32_bit: float
    link_bandwidth: float

    def flops(self, dtype_bytes: int) -> float:
        return self.flops_32_bit if dtype_bytes == 4 else self.flops_16_bit


DEVICES = {
    device.name: device
    for device in (
        Device("h100", 80 * 10**9, 3.35e12, 989e12, 67e12, 450e9),
        Device("h200", 141 * 10**9, 4.8e12, 989e12, 67e12, 450e9),
        Device("a100", 80 * 10**9, 2.039e12, 312e12, 19.5e12, 300e9),
    )
}

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)\s*", re.ASCII)


def find_device(name: str) -> Device:
    """Returns the device with this name. Raises PlanningError."""
    device = DEVICES.get(name.lower())
    if device is None:
        raise PlanningError(f"device: {name!r} is not known; known: {', '.join(DEVICES)}")
    return device


def parse_bytes(text: str) -> int:
    """Parses a size such as `80GB` (10^9) or `80GiB` (2^30). Raises PlanningError."""
    match = _SIZE.fullmatch(text)
    if not match or match[2] not in _UNITS:
        raise PlanningError(f"expected a size such as 80GB or 79.2GiB, not {text!r}")
    size = float(match[1]) * _UNITS[match[2]]
    if size > _MAX_BYTES:
        raise PlanningError(f"expected a size of at most 1000TB, not {text[:20]!r}")
    return int(size)
