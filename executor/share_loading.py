"""Loads the share of one rank: its weights, its kernels and its pool. An executor of one rank has the whole model."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

import kernels
from executor.checkpoints.checkpoint import Checkpoint, TensorSource, torch_dtype
from executor.checkpoints.model_config import ModelConfig, read_model_config
from executor.checkpoints.random_weights import RandomCheckpoint
from executor.checkpoints.shares import Share
from executor.config import ExecutorConfig
from executor.device.device_memory import fitting
from executor.device.free_memory import free_memory_bytes
from executor.device.kv_pool import allocate_pool, fitting_blocks, kv_bytes_per_token
from executor.errors import CheckpointError
from executor.grammars.grammar_cache import Grammars
from executor.models.decoder import Decoder
from executor.models.eager import EagerModel
from executor.models.model import Model
from executor.models.weights import DecoderWeights, expected_shapes, load_weights
from executor.parallel.ranks import Ranks
from executor.plans.limits import PlanLimits, resolve_limits, resolve_max_model_len
from kernels import reference

if TYPE_CHECKING:
    from torch import Tensor

    from executor.cuda.runner import CudaRunner
    from executor.device.runner import ModelRunner

Say = Callable[[str], None]
"""Prints a line about progress."""

Lead = Callable[[Model], Model]
"""Returns the model of all ranks, given that of this one."""


class Start(Protocol):
    """Makes a runner in two steps: everything but the pool, and then the rest."""

    @property
    def memory_bytes(self) -> dict[str, int]:
        """Returns the memory of the runner besides weights and pool, by kind, as far as it is known."""
        ...

    def free_for_pool(self) -> int:
        """Returns the bytes that are free for a pool once a runner has what it needs. Raises OutOfMemory."""
        ...

    def make_runner(self, pool: "Tensor", limits: PlanLimits, grammars: Grammars | None) -> "ModelRunner | CudaRunner":
        """Makes a runner, and everything that its first step needs. Raises OutOfMemory."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedShare:
    """The share of a rank."""

    decoder: Decoder
    backend: kernels.Kernels
    start: Start
    limits: PlanLimits
    pool: "Tensor"

    def make_model(self) -> Model:
        """Returns the model of this share alone, on the CPU. Raises OutOfMemory."""
        with _fitting_step(self.limits):
            return _model(self.decoder, self.backend, self.pool, self.limits)


def load_share(
    config: ExecutorConfig,
    directory: Path,
    device: torch.device,
    ranks: Ranks,
    lead: Lead,
    startup_s: dict[str, float],
    say: Say,
) -> LoadedShare:
    """Loads the share of this rank. Mutates startup_s. Raises ConfigError, CheckpointError, OutOfMemory, RankLost."""
    whole = read_model_config(directory)
    share = ranks.share(whole)
    own = share.of(whole)
    max_model_len = resolve_max_model_len(config, whole)
    limits = resolve_limits(config, whole, max_model_len, config.num_blocks or 0, device.type == "cpu")
    check_head_dim(config, whole, device)
    backend = _kernels(config.kernels, device)
    with timed(startup_s, "weights"), fitting(f"weights on {device}"):
        weights = _load_weights(config, whole, share, directory, device, backend, say)
        block_bytes = kv_bytes_per_token(own, weights.dtype) * config.block_size
        memory_bytes = {"weights": weights.num_bytes, "kv_block": block_bytes}
        communicator = ranks.connect(share, whole.vocab_size, memory_bytes)
        with fitting(f"rotary embeddings of {max_model_len:,} positions (lower --max-model-len)"):
            decoder = Decoder(own, weights, backend, max_model_len, communicator)
    shape = kernels.AttentionShape(
        dtype=decoder.dtype,
        num_heads=own.num_heads,
        num_kv_heads=own.num_kv_heads,
        head_dim=own.head_dim,
        block_size=config.block_size,
    )
    with timed(startup_s, "kernels"):
        start = _start(config, decoder, backend, shape, limits, lead, say)
    if config.num_blocks is None:
        with timed(startup_s, "sizing"):
            free_bytes = start.free_for_pool()
        taken_bytes = {"weights": weights.num_bytes} | start.memory_bytes
        num_blocks = ranks.least(fitting_blocks(config, own, decoder.dtype, device, free_bytes, taken_bytes))
        limits = replace(limits, num_blocks=num_blocks)
    with timed(startup_s, "kv_pool"):
        pool = allocate_pool(own, limits.num_blocks, config.block_size, decoder.dtype, device)
    say(
        f"KV pool: {limits.num_blocks} blocks of {config.block_size} tokens, {pool.nbytes / 2**20:,.0f} MiB;"
        f" {limits.max_num_seqs} sequences, {limits.max_num_batched_tokens} tokens per step"
    )
    return LoadedShare(decoder, backend, start, limits, pool)


def check_head_dim(config: ExecutorConfig, model: ModelConfig, device: torch.device) -> None:
    """Raises CheckpointError for heads that the kernels cannot compute, before any weights are loaded."""
    if config.kernels == "reference":
        return
    if device.type == "cpu" and model.head_dim % 4:
        raise CheckpointError(f"head_dim: must be a multiple of 4 on the CPU, is {model.head_dim}")
    if device.type == "cuda" and model.head_dim > 256:
        raise CheckpointError(f"head_dim: must be at most 256 on a GPU, is {model.head_dim}")


def _start(
    config: ExecutorConfig,
    decoder: Decoder,
    backend: kernels.Kernels,
    shape: kernels.AttentionShape,
    limits: PlanLimits,
    lead: Lead,
    say: Say,
) -> Start:
    if decoder.device.type == "cuda" and config.kernels == "auto":
        from executor.cuda.loading import CudaStart  # loads Triton, which a CPU host does without

        return CudaStart(decoder, shape, limits, partial(_progress, say))
    backend.warm_up(shape, _progress(say, "kernels"))
    return PlainStart(decoder, backend, lead)


@dataclass(frozen=True, slots=True)
class PlainStart:
    """The start of a runner that computes each step at once, and takes little memory besides weights and pool."""

    decoder: Decoder
    backend: kernels.Kernels
    lead: Lead
    memory_bytes: dict[str, int] = field(default_factory=dict)

    def free_for_pool(self) -> int:
        return free_memory_bytes(self.decoder.device)

    def make_runner(self, pool: "Tensor", limits: PlanLimits, grammars: Grammars | None) -> "ModelRunner":
        from executor.device.runner import ModelRunner  # loads numba, which a GPU host does without

        with _fitting_step(limits):
            model = _model(self.decoder, self.backend, pool, limits)
            return ModelRunner(self.lead(model), limits, grammars)


def _model(decoder: Decoder, backend: kernels.Kernels, pool: torch.Tensor, limits: PlanLimits) -> Model:
    """Returns a program of compiled kernels for the CPU; with reference kernels, a model that runs each operation."""
    if backend is reference:
        return EagerModel(decoder, backend, pool)
    from executor.models.program import ProgramModel  # loads numba

    return ProgramModel(decoder, pool, limits.max_num_batched_tokens, limits.max_num_seqs)


def _fitting_step(limits: PlanLimits) -> AbstractContextManager[None]:
    """Returns a context for what allocates memory for the largest step, and for the slots."""
    return fitting(
        f"a step of {limits.max_num_batched_tokens:,} tokens and {limits.max_num_seqs:,} sequences"
        " (lower --max-num-batched-tokens, --max-num-seqs or --max-model-len)"
    )


def _load_weights(
    config: ExecutorConfig,
    model_config: ModelConfig,
    share: Share,
    directory: Path,
    device: torch.device,
    backend: kernels.Kernels,
    say: Say,
) -> DecoderWeights:
    """Returns the weights of a share. model_config: that of the whole model."""
    checkpoint = _checkpoint(config, model_config, directory, device)
    dtype = _dtype(config, model_config, checkpoint)
    say(f"loading {model_config.architecture} from {directory} as {str(dtype).removeprefix('torch.')} on {device}")
    weights = load_weights(checkpoint, model_config, dtype, device, backend, _layer_progress(say), share)
    say(f"weights: {weights.num_bytes / 2**20:,.0f} MiB")
    return weights


def _checkpoint(
    config: ExecutorConfig, model_config: ModelConfig, directory: Path, device: torch.device
) -> TensorSource:
    if config.load_format == "random":
        return RandomCheckpoint(expected_shapes(model_config), torch_dtype(model_config.dtype or "float32"), device)
    return Checkpoint(directory)


def _dtype(config: ExecutorConfig, model_config: ModelConfig, checkpoint: TensorSource) -> torch.dtype:
    """Returns the configured dtype, else the one in config.json, else that of the embedding on disk."""
    if config.dtype != "auto":
        return torch_dtype(config.dtype)
    if model_config.dtype is not None:
        return torch_dtype(model_config.dtype)
    name = "model.embed_tokens.weight"
    stored = checkpoint.tensor(name).dtype if name in checkpoint.names else torch.float32
    return torch_dtype(str(stored).removeprefix("torch."))


def _layer_progress(say: Say) -> Callable[[int, int], None]:
    """Prints progress once a second, and nothing for a model that loads faster."""
    said_s = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal said_s
        if time.monotonic() - said_s > 1.0:
            said_s = time.monotonic()
            say(f"loading weights: layer {done} of {total}")

    return progress


def _kernels(name: str, device: torch.device) -> kernels.Kernels:
    if name == "reference":
        return reference
    return kernels.select(device)


def _progress(say: Say, phase: str) -> kernels.Progress:
    """Prints the progress of a phase only after half a second: kernels from the cache are ready sooner."""
    quiet_until_s = time.monotonic() + 0.5

    def progress(name: str, done: int, total: int) -> None:
        if not done or time.monotonic() > quiet_until_s:
            say(f"{phase}: {done} of {total} ready, now {name}")

    return progress


@contextmanager
def timed(durations_s: dict[str, float], phase: str) -> Iterator[None]:
    """Adds the time that a phase takes."""
    started_s = time.monotonic()
    yield
    durations_s[phase] = time.monotonic() - started_s
