"""The KV pool: the keys and values of all sequences, in blocks.

    pool[num_layers, num_blocks, 2, num_kv_heads, block_size, head_dim]

Block 0 is the null block: padding is written to it, and it is never read. The scheduler decides what all others hold.
"""

import torch
from torch import Tensor

from executor.checkpoints.model_config import ModelConfig
from executor.config import ExecutorConfig
from executor.errors import OutOfMemory
from executor.memory.free_memory import free_memory_bytes
from kernels.memory import zeros

_GPU_FRACTION = 0.9
_CPU_FRACTION = 0.4
_CPU_CAP_BYTES = 2 << 30


def kv_bytes_per_token(model: ModelConfig, dtype: torch.dtype) -> int:
    """Returns the bytes of one token's keys and values in all layers."""
    return 2 * model.num_layers * model.kv_size * dtype.itemsize


def choose_num_blocks(config: ExecutorConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> int:
    """Returns the configured number of blocks, else what fits into the memory share. Call it after loading the weights.

    Raises OutOfMemory if not even the null block and one more fit.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    free_bytes = free_memory_bytes(device)
    budget_bytes = _budget_bytes(config.memory_fraction, free_bytes, on_cpu=device.type == "cpu")
    block_bytes = kv_bytes_per_token(model, dtype) * config.block_size
    num_blocks = budget_bytes // block_bytes
    if num_blocks < 2:
        raise OutOfMemory(
            f"KV pool: {free_bytes:,} bytes are free on {device}, {budget_bytes:,} of them for KV;"
            f" two blocks take {2 * block_bytes:,}"
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
