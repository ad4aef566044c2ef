"""The KV pool: the keys and values of all sequences, in blocks.

    pool[num_layers, num_blocks, 2, num_kv_heads, block_size, head_dim]

Block 0 is the null block: padding is written to it, and it is never read. The scheduler decides what all others hold.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from executor.checkpoints.model_config import ModelConfig
from executor.config import ExecutorConfig
from executor.errors import OutOfMemory
from kernels.memory import zeros

_GPU_FRACTION = 0.9
_CPU_FRACTION = 0.4
_CPU_CAP_BYTES = 2 << 30


def kv_bytes_per_token(model: ModelConfig, dtype: torch.dtype) -> int:
    """Returns the bytes of one token's keys and values in all layers."""
    return 2 * model.num_layers * model.kv_size * dtype.itemsize


def fitting_blocks(
    config: ExecutorConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    free_bytes: int,
    taken_bytes: Mapping[str, int],
) -> int:
    """Returns the number of blocks that fit into the memory share of free_bytes, the null block included.

    free_bytes is what is free for the pool once everything else has its memory; taken_bytes is that memory by kind, for
    the message. Ranks on the CPU divide the memory of one machine; `model` is the share of this rank. Raises
    OutOfMemory if not even the null block and one more fit.
    """
    on_cpu = device.type == "cpu"
    budget_bytes = _budget_bytes(config.memory_fraction, free_bytes, on_cpu)
    if on_cpu:
        budget_bytes //= config.num_local_ranks
    block_bytes = kv_bytes_per_token(model, dtype) * config.block_size
    num_blocks = budget_bytes // block_bytes
    if num_blocks < 2:
        taken = ", ".join(f"{kind.replace('_', ' ')} {num_bytes:,}" for kind, num_bytes in taken_bytes.items())
        raise OutOfMemory(
            f"KV pool: {free_bytes:,} bytes are left on {device}, {budget_bytes:,} of them for KV; two blocks take"
            f" {2 * block_bytes:,}. Bytes taken: {taken}. Lower --max-num-batched-tokens (activations) or"
            " --max-num-seqs (step buffers, graphs), or choose a smaller --dtype or model (weights)"
        )
    return num_blocks


def _budget_bytes(memory_fraction: float | None, free_bytes: int, on_cpu: bool) -> int:
    if memory_fraction is not None:
        return int(free_bytes * memory_fraction)
    return min(int(free_bytes * _CPU_FRACTION), _CPU_CAP_BYTES) if on_cpu else int(free_bytes * _GPU_FRACTION)


def allocate_pool(
    model: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Returns a pool of zeros. On the CPU, the system provides its pages later, see `kernels.memory.populate`."""
    shape = (model.num_layers, num_blocks, 2, model.num_kv_heads, block_size, model.head_dim)
    try:
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        return zeros(shape, dtype)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise OutOfMemory(f"KV pool of {num_blocks} blocks: {error}") from None
