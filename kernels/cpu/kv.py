"""Writes to the KV pool: the new tokens of a step, and copies of whole blocks."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from kernels.cpu.compiler import compiled
from kernels.cpu.native import FLOAT32, array, count_up, read, storage_of, strided, write
from kernels.cpu.team import Job, Kernel, job_dtype

# One thread rotates fewer heads, or copies fewer bytes, in about ten microseconds.
_MIN_TEAM_HEADS = 1536
_MIN_TEAM_BYTES = 131072

STORE_JOB = job_dtype(
    """query query_token_bytes query_head_bytes key key_token_bytes key_head_bytes value value_token_bytes
    value_head_bytes cos sin table_bytes positions slots kv kv_block_bytes num_rows num_heads num_kv_heads head_dim
    block_size number_bytes"""
)
_COPY = job_dtype("pool layer_bytes block_bytes num_layers num_copies sources destinations")

_store_job = Job(STORE_JOB)
_copy_job = Job(_COPY)


@cache
def store_kernel(storage: int) -> Kernel:
    """Returns the kernel that rotates query and key and stores key and value; a token is a unit."""

    def store(address: int) -> None:
        job = array(address, 1, STORE_JOB)[0]
        half, half_bytes = job.head_dim // 2, job.head_dim // 2 * job.number_bytes
        token_bytes = job.head_dim * job.number_bytes
        head_bytes = job.block_size * token_bytes
        positions = array(job.positions, job.num_rows, np.int32)
        token_slots = array(job.slots, job.num_rows, np.int64)
        while True:
            token = count_up(address)
            if token >= job.num_rows:
                return
            cos = job.cos + positions[token] * job.table_bytes
            sin = job.sin + positions[token] * job.table_bytes
            block = token_slots[token] // job.block_size
            offset = token_slots[token] - block * job.block_size
            keys = job.kv + block * job.kv_block_bytes + offset * token_bytes
            values = keys + job.num_kv_heads * head_bytes

            # These two loops stay separate: LLVM knows that rotating in place is safe only if it sees a single address.
            for head in range(job.num_heads):
                place = job.query + token * job.query_token_bytes + head * job.query_head_bytes
                for i in range(half):
                    low, high = read(storage, place, i), read(storage, place + half_bytes, i)
                    c, s = read(FLOAT32, cos, i), read(FLOAT32, sin, i)
                    write(storage, place, i, low * c - high * s)
                    write(storage, place + half_bytes, i, high * c + low * s)
            for kv_head in range(job.num_kv_heads):
                source = job.key + token * job.key_token_bytes + kv_head * job.key_head_bytes
                target = keys + kv_head * head_bytes
                for i in range(half):
                    low, high = read(storage, source, i), read(storage, source + half_bytes, i)
                    c, s = read(FLOAT32, cos, i), read(FLOAT32, sin, i)
                    write(storage, target, i, low * c - high * s)
                    write(storage, target + half_bytes, i, high * c + low * s)
            for kv_head in range(job.num_kv_heads):
                source = job.value + token * job.value_token_bytes + kv_head * job.value_head_bytes
                target = values + kv_head * head_bytes
                for i in range(job.head_dim):
                    write(storage, target, i, read(storage, source, i))

    return Kernel(compiled(store))


@cache
def copy_kernel() -> Kernel:
    """Returns the kernel that copies blocks of any dtype; a block of one layer is a unit."""

    def copy(address: int) -> None:
        job = array(address, 1, _COPY)[0]
        origins = array(job.sources, job.num_copies, np.int64)
        destinations = array(job.destinations, job.num_copies, np.int64)
        while True:
            unit = count_up(address)
            if unit >= job.num_copies * job.num_layers:
                return
            layer, i = unit // job.num_copies, unit % job.num_copies
            blocks = job.pool + layer * job.layer_bytes
            origin = array(blocks + origins[i] * job.block_bytes, job.block_bytes, np.uint8)
            destination = array(blocks + destinations[i] * job.block_bytes, job.block_bytes, np.uint8)
            for j in range(job.block_bytes):
                destination[j] = origin[j]

    return Kernel(compiled(copy))


def rotate_and_store(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    kv: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """See `kernels.Kernels.rotate_and_store`."""
    dtype, float32 = query.dtype, torch.float32
    if key.dtype is not dtype or value.dtype is not dtype or kv.dtype is not dtype:
        raise TypeError("query, key, value and kv must have one dtype")
    if cos.dtype is not float32 or sin.dtype is not float32:
        raise TypeError("cos and sin must be float32")
    if positions.dtype is not torch.int32 or slot_mapping.dtype is not torch.int64:
        raise TypeError("positions must be int32, slot_mapping int64")
    if query.stride(2) != 1 or key.stride(2) != 1 or value.stride(2) != 1:
        raise ValueError("the last dimension of query, key and value must be contiguous")
    if not all(tensor.is_contiguous() for tensor in (kv, cos, sin, positions, slot_mapping)):
        raise ValueError("kv, cos, sin, positions and slot_mapping must be contiguous")

    num_tokens = query.shape[0]
    job = _store_job.fill(
        positions=positions.data_ptr(),
        slots=slot_mapping.data_ptr(),
        num_rows=num_tokens,
        **store_fields(query, key, value, cos, sin, kv),
    )
    kernel = store_kernel(storage_of(dtype))
    if num_tokens * (query.shape[1] + 2 * key.shape[1]) < _MIN_TEAM_HEADS:
        kernel.run_brief(job)
    else:
        kernel.run_in_team(job)


def store_fields(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, kv: torch.Tensor
) -> dict[str, int]:
    """Returns the fields of a STORE_JOB, except positions, slots (the token slots, int64) and num_rows."""
    _, num_kv_heads, block_size, head_dim = kv.shape[1:]
    number_bytes = query.element_size()
    return {
        **strided("query", query),
        **strided("key", key),
        **strided("value", value),
        "cos": cos.data_ptr(),
        "sin": sin.data_ptr(),
        "table_bytes": cos.stride(0) * cos.element_size(),
        "kv": kv.data_ptr(),
        "kv_block_bytes": kv.stride(0) * number_bytes,
        "num_heads": query.shape[1],
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "block_size": block_size,
        "number_bytes": number_bytes,
    }


def copy_blocks(pool: torch.Tensor, source_blocks: torch.Tensor, destination_blocks: torch.Tensor) -> None:
    """See `kernels.Kernels.copy_blocks`."""
    if source_blocks.dtype is not torch.int64 or destination_blocks.dtype is not torch.int64:
        raise TypeError("block ids of copies must be int64")
    if not (pool.is_contiguous() and source_blocks.is_contiguous() and destination_blocks.is_contiguous()):
        raise ValueError("pool, source_blocks and destination_blocks must be contiguous")

    num_layers, num_copies = pool.shape[0], source_blocks.shape[0]
    number_bytes = pool.element_size()
    block_bytes = pool.stride(1) * number_bytes
    job = _copy_job.fill(
        pool=pool.data_ptr(),
        layer_bytes=pool.stride(0) * number_bytes,
        block_bytes=block_bytes,
        num_layers=num_layers,
        num_copies=num_copies,
        sources=source_blocks.data_ptr(),
        destinations=destination_blocks.data_ptr(),
    )
    if num_layers * num_copies * block_bytes < _MIN_TEAM_BYTES:
        copy_kernel().run_brief(job)
    else:
        copy_kernel().run_in_team(job)
