"""The sizes of the end-to-end phases, and the choice of those that fit the memory of a GPU."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from bench.gpu.random_models import SHAPES
from planning.config_file import parse_model_shape
from planning.deployment import place
from planning.devices import Device
from planning.errors import PlanningError
from planning.model_shape import DTYPE_BYTES, ModelShape
from planning.settings import DeploymentSettings


class NotHere(Exception):
    """The phase cannot run on this machine; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of each part. Lengths are in tokens.

    batch_*                 sequences that decode together. No two prompts are equal, and the lengths give the desired
                            mean context
    max_num_batched_tokens  maximum number of tokens of one step, with at most batch_size sequences; None: the defaults
                            of the executor for both
    """

    single_prompt_tokens: int
    single_output_tokens: int
    num_singles: int
    batch_size: int
    batch_prompt_tokens: int
    batch_output_tokens: int
    num_clients: int
    num_requests: int
    max_model_len: int
    max_num_batched_tokens: int | None = None

    @property
    def batch_tokens(self) -> int:
        """The number of tokens that the pool has to hold at once."""
        return max(self.batch_size * (self.batch_prompt_tokens + self.batch_output_tokens), self.max_model_len)


FULL = Scale(128, 128, 4, 64, 960, 129, 64, 192, 4096)
IN_SMALL = Scale(16, 8, 2, 4, 24, 12, 4, 8, 256)

_REDUCED_BATCHES = (32, 16, 8)
_REDUCED_MODEL_LEN = _REDUCED_STEP_TOKENS = 2048
_DEFAULT_STEP_TOKENS = 8192  # the executor's default on a GPU
_RUNTIME_BYTES = 1_000_000_000  # CUDA context, workspaces of cuBLAS, captured graphs: an estimate
_POOL_SHARE = 0.9  # the executor's default of memory_fraction on a GPU


def scales() -> Iterator[Scale]:
    """Yields the full scale, then smaller ones."""
    yield FULL
    for size in _REDUCED_BATCHES:
        yield replace(
            FULL,
            batch_size=size,
            num_clients=size,
            max_model_len=_REDUCED_MODEL_LEN,
            max_num_batched_tokens=_REDUCED_STEP_TOKENS,
        )


def fitting_scale(shape: str, memory_bytes: int) -> Scale:
    """Returns the largest scale whose weights, activations and batch fit a GPU. Raises NotHere with the bytes."""
    model = parse_model_shape(SHAPES[shape], shape)
    for scale in scales():
        num_step_tokens = scale.max_num_batched_tokens or _DEFAULT_STEP_TOKENS
        left_bytes = memory_bytes - _RUNTIME_BYTES - num_step_tokens * activation_bytes(model)
        device = Device("gpu", max(0, left_bytes), 0.0, 0.0, 0.0, 0.0)
        try:
            deployment = place(model, device, DeploymentSettings(gpu_memory_utilization=_POOL_SHARE))
        except PlanningError as error:
            reason = str(error)
            continue
        num_needed, num_held = scale.batch_tokens, deployment.num_usable_blocks * deployment.block_size
        if num_needed <= num_held:
            return scale
        reason = (
            f"{shape} has {deployment.weight_bytes / 1e9:.1f} GB of weights, and its pool would hold {num_held:,} "
            f"tokens of {deployment.kv_bytes_per_token:,} bytes, but the smallest batch has {num_needed:,}"
        )
    raise NotHere(f"{memory_bytes / 1e9:.1f} GB of memory: {reason}")


def activation_bytes(model: ModelShape) -> int:
    """Returns the bytes of activations of one token of a step.

    In the layer's MLP these are alive at once: the stacked gate and up projections, their product, and the hidden
    states with their residual, normed twice; queries, keys and values of the attention before are counted too. For 8B
    and 8,192 tokens this gives 1.2 GB.
    """
    heads = model.num_heads + 2 * model.num_kv_heads
    values = 3 * model.intermediate_size + 4 * model.hidden_size + 2 * heads * model.head_dim
    return values * DTYPE_BYTES[model.dtype or "bfloat16"]


def scale_on(device: str, shape: str, *, is_small: bool) -> Scale:
    """Returns the scale for a device such as "cuda:1"; the CPU has the full scale. Raises NotHere."""
    check_here(device)
    if is_small:
        return IN_SMALL
    if device == "cpu":
        return FULL
    return fitting_scale(shape, torch.cuda.get_device_properties(device).total_memory)


def check_here(device: str) -> None:
    """Raises NotHere if there is no such device."""
    wanted = torch.device(device)
    if wanted.type == "cuda" and torch.cuda.device_count() <= (wanted.index or 0):
        raise NotHere(f"needs {device}, and torch sees {torch.cuda.device_count()} GPUs here")
