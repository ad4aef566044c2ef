"""Tile sizes, in fixed tables: no autotuning takes place while serving.

The sizes depend on the padded head_dim and the size of a number, which determine the tile of keys, and on the shared
memory of a multiprocessor. They do not depend on the group up to 16 heads (the rows of one matrix instruction, used or
not), nor on the block size (a tile looks up the block of each of its tokens). A shape that needs its own numbers on
some device is one more line in these tables.

Decode is bound by memory and needs many bytes in flight: by Little's law about 3 TB/s x 0.7 µs / 132 multiprocessors
= 16 KB each, and other programs have to cover the time that a program waits at its barriers. With tiles of keys and
values of 32 KB, one loading while another is computed, a program needs 70 KB of shared memory and about 110 registers
in each of 128 threads. On Hopper, whose multiprocessors have 228 KB, that allows three programs per multiprocessor and
up to 96 KB in flight. Larger tiles allow only one program, smaller ones need more barriers.

Chunks of 256 tokens cost 1/64 more bytes if a kv head has 4 query heads (256 tokens are 128 KB, a part is 2 KB), and
keep 32 programs busy at batch 1 and 1k tokens. A part has as many bytes as `group` float32 rows, so models with eight
query heads per kv head use chunks of 512.

Prefill is bound by arithmetic: 128 rows give each of two warp groups the 64 rows of Hopper's matrix instruction. With
head_dim 128, accumulators, scores and weights take 180 registers per thread, so a multiprocessor runs one program,
whose stages hide the loads. head_dim 64 leaves room for two programs. head_dim 256 needs 128 registers per thread for
the accumulators alone, so its tile of keys is small enough to avoid register spills. Instructions of other devices keep
the queries in registers too, so their tiles are smaller. Tiles of 16-bit numbers have three stages everywhere: the
loads of block ids take one, and with two the loads of keys and values would not overlap with products.

float32 has no exact matrix instruction: its products are plain multiplications, and small tiles limit the size of the
unrolled code. float32 exists for correctness, not for speed.
"""

from dataclasses import dataclass
from functools import cache

import torch

from kernels.interface import AttentionShape
from kernels.triton.jit import padded


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """Tile sizes of decode attention.

    chunk_tokens: the length of the chunks that a context is split into. It influences the bits of the results, so it
    must not depend on the batch.
    """

    chunk_tokens: int
    tile_tokens: int
    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int


@dataclass(frozen=True, slots=True)
class PrefillTuning:
    """Tile sizes of prefill attention. tile_rows: query tokens times heads of the group."""

    tile_rows: int
    tile_tokens: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Multiprocessors:
    """The multiprocessors of a device. shared_kib: KiB of shared memory of each; each program reserves one of them."""

    count: int
    shared_kib: int


# Keys: (padded head_dim, bytes of a number).
_DECODE_TILE_TOKENS = {(64, 2): 128, (128, 2): 64, (256, 2): 32, (64, 4): 32, (128, 4): 32, (256, 4): 16}

# tile_rows, tile_tokens, num_warps, num_stages
_PREFILL_LARGE = {
    (64, 2): PrefillTuning(128, 64, 8, 3),
    (128, 2): PrefillTuning(128, 64, 8, 3),
    (256, 2): PrefillTuning(128, 32, 8, 3),
    (64, 4): PrefillTuning(32, 16, 4, 2),
    (128, 4): PrefillTuning(32, 16, 8, 2),
    (256, 4): PrefillTuning(16, 16, 4, 2),
}
_PREFILL_SMALL = _PREFILL_LARGE | {
    (128, 2): PrefillTuning(128, 32, 8, 3),
    (256, 2): PrefillTuning(64, 16, 8, 3),
}

# KiB of shared memory of a multiprocessor by compute capability (CUDA C++ Programming Guide, "Compute Capabilities").
_SHARED_KIB = {(8, 0): 164, (8, 6): 100, (8, 7): 164, (8, 9): 100, (12, 0): 100, (12, 1): 100}
_LARGE_SHARED_KIB = 228  # Hopper and the large multiprocessors of Blackwell
_DECODE_SHARED_KIB = 75  # of a program of decode with 16-bit numbers
_SMALLEST_HEAD, _LARGEST_HEAD = 64, 256


@cache
def multiprocessors(device: torch.device) -> Multiprocessors:
    """Returns the multiprocessors of a device; for the CPU, where Triton's interpreter runs, two large ones."""
    if device.type != "cuda":
        return Multiprocessors(2, _LARGE_SHARED_KIB)
    properties = torch.cuda.get_device_properties(device)
    return multiprocessors_of(properties.multi_processor_count, properties.major, properties.minor)


def multiprocessors_of(count: int, major: int, minor: int) -> Multiprocessors:
    """Returns the multiprocessors of a device of compute capability `major`.`minor`."""
    return Multiprocessors(count=count, shared_kib=_SHARED_KIB.get((major, minor), _LARGE_SHARED_KIB))


def decode_tuning(shape: AttentionShape, device: torch.device) -> DecodeTuning:
    """Returns the tile sizes for decodes of a model on a device. Raises ValueError if head_dim is above 256."""
    return DecodeTuning(
        chunk_tokens=256 if shape.num_heads // shape.num_kv_heads <= 4 else 512,
        tile_tokens=_DECODE_TILE_TOKENS[_key(shape)],
        num_warps=4,
        num_stages=3,
        programs_per_multiprocessor=multiprocessors(device).shared_kib // _DECODE_SHARED_KIB,
    )


def prefill_tuning(shape: AttentionShape, device: torch.device) -> PrefillTuning:
    """Returns the tile sizes for prefills of a model on a device. Raises ValueError if head_dim is above 256."""
    table = _PREFILL_LARGE if multiprocessors(device).shared_kib >= _LARGE_SHARED_KIB else _PREFILL_SMALL
    return table[_key(shape)]


def _key(shape: AttentionShape) -> tuple[int, int]:
    if shape.head_dim > _LARGEST_HEAD:
        raise ValueError(f"head_dim must be at most {_LARGEST_HEAD}, not {shape.head_dim}")
    return max(_SMALLEST_HEAD, padded(shape.head_dim)), shape.dtype.itemsize
