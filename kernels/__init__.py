"""The kernels: tensors in, tensors out. kernels/interface.py specifies them; `select` picks an implementation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.interface import AttentionShape, Kernels, Linear, Progress

if TYPE_CHECKING:
    import torch

__all__ = ["AttentionShape", "Kernels", "Linear", "Progress", "select"]


def select(device: torch.device) -> Kernels:
    """Returns the kernels for tensors on `device`: numba on the CPU, Triton on a GPU, otherwise the reference.

    The implementation is imported here and not earlier: importing numba takes a third of a second, which hosts with
    a GPU need not spend.
    """
    if device.type == "cpu":
        from kernels import cpu

        return cpu
    if device.type == "cuda":
        from kernels import triton

        return triton
    from kernels import reference

    return reference
