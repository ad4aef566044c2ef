"""Every operation for the CPU, compiled by numba once per machine and run on the threads of torch's OpenMP runtime.

Signatures, shapes and layouts are those of `kernels.Kernels`. KV blocks are read in place.
"""

from __future__ import annotations

from kernels.cpu.attention import attention_decode, attention_prefill
from kernels.cpu.elementwise import add_rms_norm, rms_norm, silu_multiply
from kernels.cpu.kv import copy_blocks, rotate_and_store
from kernels.cpu.linear import pack_linear
from kernels.cpu.ranking import rank
from kernels.cpu.sampling import sample
from kernels.cpu.warmup import warm_up

__all__ = [
    "add_rms_norm",
    "attention_decode",
    "attention_prefill",
    "copy_blocks",
    "pack_linear",
    "rank",
    "rms_norm",
    "rotate_and_store",
    "sample",
    "silu_multiply",
    "warm_up",
]
