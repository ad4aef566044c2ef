"""How many sequences a pool holds, reserved in one run each or paged, and what a step costs then at least."""

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
    """Sequences that the pool holds at once.

    num_tokens      of each, as it stands: full length, or what a sequence has on average while it runs
    num_contiguous  each with max_model_len reserved in one run
    num_paged       each with the blocks that it fills
    decode_floor_s  of a step that decodes all the paged ones: weights and KV, read once
    """

    name: str
    num_tokens: float
    num_contiguous: int
    num_paged: int
    decode_floor_s: float


@dataclass(frozen=True, slots=True)
class Capacity:
    """decode_floor_s    of one sequence with an empty context: reading the weights
    prefill_floors_s  seconds to compute a prompt of so many tokens alone
    """

    rows: tuple[CapacityRow, ...]
    decode_floor_s: float
    prefill_floors_s: tuple[tuple[int, float], ...]


def find_capacity(deployment: Deployment, efficiencies: Efficiencies | None = None) -> Capacity:
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
    """Tokens, and blocks, that a sequence holds on average over the steps that it runs.

    A request with prompt p and output o holds p + i tokens in its i-th decode: long requests count as long as they run.
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
    """Sum of the blocks for 1, 2, … num_tokens tokens."""
    full, rest = divmod(num_tokens, block_size)
    return block_size * full * (full + 1) // 2 + rest * (full + 1)


def prefill_floor_s(deployment: Deployment, num_tokens: int, reached: Efficiencies) -> float:
    """Of one prompt, alone: matrix products and attention at the rates that kernels reach, no overhead."""
    model, parallel = deployment.model, deployment.tensor_parallel
    flops = deployment.device.flops(deployment.dtype_bytes)
    products = 2 * (num_tokens * model.num_layer_matrix_parameters(parallel) + model.num_head_parameters(parallel))
    attention = model.attention_flops(num_tokens * (num_tokens + 1) // 2, parallel)
    return products / (flops * reached.compute) + attention / (flops * reached.prefill)
