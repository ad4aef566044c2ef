"""Tile sizes, frozen: nothing is tried out while serving.

What decides is the padded size of a head and of a number, for they make the tile of keys, and the shared memory of a
multiprocessor. The group changes nothing up to 16 heads (the rows of one matrix instruction, used or not), nor does
the block size (a tile finds a block for each of its tokens). Should a measurement on some device find a shape that
wants its own numbers, that is one line here.

Decode is bound by memory, and lives from bytes under way: Little's law asks for about 3 TB/s x 0.7 µs / 132
multiprocessors = 16 KB each, and what a program waits at its barriers has to be covered by others. A tile of keys and
values of 32 KB, one of them loading while another is computed from, needs 70 KB of shared memory and about 110
registers in each of 128 threads: three programs a multiprocessor, up to 96 KB under way. Larger tiles leave one
program, smaller ones pay for more barriers.

Chunks of 256 tokens cost 1/64 more bytes where a kv head has 4 heads (256 tokens are 128 KB, a part is 2 KB), and at
batch 1 and 1k tokens still keep 32 programs busy. A part weighs as many bytes as `group` float32 rows, so eight heads
to a kv head take chunks of 512.

Prefill is bound by arithmetic: 128 rows give each of two warp groups the 64 rows that Hopper's matrix instruction
takes. For heads of 128, accumulators, scores and weights come to 180 registers a thread, so one program a
multiprocessor, whose stages hide the loads. Heads of 64 leave room for two. Heads of 256 need 128 registers a thread
for the accumulators alone, so their tile of keys is the smallest that spills nothing.

float32 has no exact matrix instruction: its products are plain multiplications, and tiles are small to keep the
unrolled code in bounds. It is there to be right.
"""

from dataclasses import dataclass
from functools import cache

import torch

from kernels import AttentionShape
from kernels.triton.jit import padded


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """chunk_tokens: of the split over the context; a part of every result's bits, so never a matter of the batch."""

    chunk_tokens: int
    tile_tokens: int
    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int


@dataclass(frozen=True, slots=True)
class PrefillTuning:
    """tile_rows: query tokens times heads of the group."""

    tile_rows: int
    tile_tokens: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Multiprocessors:
    """How many there are, and whether each has at least 160 KiB of shared memory."""

    count: int
    are_large: bool


# By (padded head_dim, bytes of a number).
_DECODE_TILE_TOKENS = {(64, 2): 128, (128, 2): 64, (256, 2): 32, (64, 4): 64, (128, 4): 32, (256, 4): 16}

# tile_rows, tile_tokens, num_warps, num_stages
_PREFILL_LARGE = {
    (64, 2): PrefillTuning(128, 64, 8, 3),
    (128, 2): PrefillTuning(128, 64, 8, 3),
    (256, 2): PrefillTuning(128, 32, 8, 3),
    (64, 4): PrefillTuning(32, 32, 4, 2),
    (128, 4): PrefillTuning(32, 16, 8, 2),
    (256, 4): PrefillTuning(32, 16, 8, 2),
}
_PREFILL_SMALL = {
    (64, 2): PrefillTuning(128, 64, 8, 3),
    (128, 2): PrefillTuning(128, 64, 8, 2),
    (256, 2): PrefillTuning(64, 32, 8, 2),
    (64, 4): PrefillTuning(32, 32, 4, 2),
    (128, 4): PrefillTuning(32, 16, 8, 2),
    (256, 4): PrefillTuning(32, 16, 8, 2),
}

# Compute capabilities whose multiprocessors have 100 KiB: the small ones of Ampere, Ada and Blackwell.
_SMALL = {(8, 6), (8, 7), (8, 9), (12, 0), (12, 1)}
_SMALLEST_HEAD, _LARGEST_HEAD = 64, 256


@cache
def multiprocessors(device: torch.device) -> Multiprocessors:
    """Of a device. On the CPU, where the interpreter runs one program after the other: a few large ones."""
    if device.type != "cuda":
        return Multiprocessors(count=2, are_large=True)
    properties = torch.cuda.get_device_properties(device)
    return Multiprocessors(
        count=properties.multi_processor_count,
        are_large=(properties.major, properties.minor) not in _SMALL,
    )


def decode_tuning(shape: AttentionShape, device: torch.device) -> DecodeTuning:
    """For decodes of a model on a device. Raises ValueError for heads of more than 256."""
    return DecodeTuning(
        chunk_tokens=256 if shape.num_heads // shape.num_kv_heads <= 4 else 512,
        tile_tokens=_DECODE_TILE_TOKENS[_key(shape)],
        num_warps=4,
        num_stages=3,
        programs_per_multiprocessor=3 if multiprocessors(device).are_large else 1,
    )


def prefill_tuning(shape: AttentionShape, device: torch.device) -> PrefillTuning:
    """For prefills of a model on a device. Raises ValueError for heads of more than 256."""
    table = _PREFILL_LARGE if multiprocessors(device).are_large else _PREFILL_SMALL
    return table[_key(shape)]


def _key(shape: AttentionShape) -> tuple[int, int]:
    if shape.head_dim > _LARGEST_HEAD:
        raise ValueError(f"head_dim must be at most {_LARGEST_HEAD}, not {shape.head_dim}")
    return max(_SMALLEST_HEAD, padded(shape.head_dim)), shape.dtype.itemsize
