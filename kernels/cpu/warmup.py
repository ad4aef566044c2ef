"""Compiles every kernel that a model calls, or loads it from the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.cpu.attend import attend_kernel
from kernels.cpu.elementwise import norm_kernel, silu_kernel, take_kernel
from kernels.cpu.kv import copy_kernel, store_kernel
from kernels.cpu.linear import linear_kernel
from kernels.cpu.native import BFLOAT16, FLOAT16, FLOAT32, storage_of
from kernels.cpu.panels import row_format
from kernels.cpu.program import program_kernel
from kernels.cpu.ranking import rank_kernel
from kernels.cpu.sampling import sample_kernel
from kernels.cpu.tiles import tiles_kernel

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernels.interface import AttentionShape, Progress


def warm_up(shape: AttentionShape, progress: Progress | None = None) -> None:
    """See `kernels.Kernels.warm_up`. Takes a second or two if the cache is empty, otherwise some tens of ms."""
    storage = storage_of(shape.dtype)
    weights = {storage, BFLOAT16, FLOAT16}
    variants: list[tuple[str, Callable[[], object]]] = [
        ("attention", attend_kernel),
        ("attention tiles", lambda: tiles_kernel(shape.head_dim, storage)),
        ("rotate and store", lambda: store_kernel(storage)),
        ("copy blocks", copy_kernel),
        ("norms", lambda: norm_kernel(storage)),
        ("activation", lambda: silu_kernel(storage)),
        ("embedding", take_kernel),
        ("linear layers", lambda: [linear_kernel(storage, own, row_format(storage, own, 0)) for own in weights]),
        ("sampling", lambda: [sample_kernel(own) for own in {storage, FLOAT32}]),
        ("log-probabilities", lambda: [rank_kernel(own) for own in {storage, FLOAT32}]),
        ("programs", program_kernel),
    ]
    for done, (name, make) in enumerate(variants):
        if progress is not None:
            progress(name, done, len(variants))
        make()
