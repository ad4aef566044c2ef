"""The number of sequences that fit a pool with contiguous and with paged memory, and lower bounds of step times."""

import random
from dataclasses import dataclass

from planning.deployment import Deployment
from planning.lengths import ALPACA, SHAREGPT, Lengths
from planning.roofline import Efficiencies

_NUM_DRAWN = 20_000
_SEED = 7
_CONTEXTS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
_PROMPTS = (512, 2048, 8192)


@dataclass(frozen=True, slots=True)
class CapacityRow:
    """The number of sequences of one length that the pool holds at once.

    num_tokens      tokens of each sequence: a fixed length, or the mean number over the steps that a sequence runs
    num_contiguous  sequences that fit if each reserves max_model_len contiguous tokens
    num_paged       sequences that fit if each holds only the blocks it fills
    decode_floor_s  lower bound of a step that decodes num_paged sequences: reading weights and KV once
    """

    name: str
    num_tokens: float
    num_contiguous: int
    num_paged: int
    decode_floor_s: float


@dataclass(frozen=True, slots=True)
class Capacity:
    """The capacity of a deployment, and lower bounds of its step times.

    decode_floor_s    decode step of one sequence with an empty context: reading the weights
    prefill_floors_s  (number of tokens, seconds to compute a prompt of that length alone)
    """

    rows: tuple[CapacityRow, ...]
    decode_floor_s: float
    prefill_floors_s: tuple[tuple[int, float], ...]


def find_capacity(deployment: Deployment, efficiencies: Efficiencies | None = None) -> Capacity:
    """Returns the capacity for some fixed lengths and for two mixes of lengths."""
    reached = efficiencies or Efficiencies()
    bandwidth = deployment.device.bandwidth * reached.bandwidth
    num_usable = deployment.num_usable_blocks
    num_contiguous = num_usable // deployment.num_blocks_for(deployment.max_model_len)

    def row(name: str, num_tokens: float, num_blocks: float) -> CapacityRow:
        num_paged = int(num_usable / num_blocks)
        read = deployment.read_bytes + num_paged * num_tokens * deployment.kv_bytes_per_token
        return CapacityRow(name, num_tokens, num_contiguous, num_paged, read / bandwidth)

    lengths = [n for n in _CONTEXTS if n < deployment.max_model_len] + [deployment.max_model_len]
    rows = [row(f"{n:,} tokens", n, deployment.num_blocks_for(n)) for n in lengths]
    rows += [
        row(mix.name, *mean_held(mix, deployment.max_model_len, deployment.block_size)) for mix in (ALPACA, SHAREGPT)
    ]
    prompts = [n for n in _PROMPTS if n <= deployment.max_model_len]
    return Capacity(
        tuple(rows),
        deployment.read_bytes / bandwidth,
        tuple((n, prefill_floor_s(deployment, n, reached)) for n in prompts),
    )


def mean_held(lengths: Lengths, max_model_len: int, block_size: int) -> tuple[float, float]:
    """Returns the mean numbers of tokens and of blocks that a sequence holds, over the steps that it runs.

    A request with prompt p and output o holds p + i tokens in its i-th decode, so requests count in proportion to their
    number of steps.
    """
    rng = random.Random(_SEED)
    num_steps = num_tokens = num_blocks = 0
    for _ in range(_NUM_DRAWN):
        prompt, output = lengths.draw(rng, max_model_len)
        num_steps += output
        num_tokens += output * prompt + output * (output - 1) // 2
        num_blocks += _blocks_up_to(prompt + output - 1, block_size) - _blocks_up_to(prompt - 1, block_size)
    return num_tokens / num_steps, num_blocks / num_steps


def _blocks_up_to(num_tokens: int, block_size: int) -> int:
    """Returns the sum of the numbers of blocks that 1, 2, …, num_tokens tokens need."""
    full, rest = divmod(num_tokens, block_size)
    return block_size * full * (full + 1) // 2 + rest * (full + 1)


def prefill_floor_s(deployment: Deployment, num_tokens: int, reached: Efficiencies) -> float:
    """Returns the time for one prompt alone: matrix products and attention at the rates of the kernels, no overhead."""
    model, parallel = deployment.model, deployment.tensor_parallel
    flops = deployment.device.flops(deployment.dtype_bytes)
    products = 2 * (num_tokens * model.num_layer_matrix_parameters(parallel) + model.num_head_parameters(parallel))
    attention = model.attention_flops(num_tokens * (num_tokens + 1) // 2, parallel)
    return products / (flops * reached.compute) + attention / (flops * reached.prefill)
