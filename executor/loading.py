"""Loads a model as configured into a runner that is ready for its first plan."""

import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import kernels
from executor.checkpoints.checkpoint import Checkpoint, TensorSource, locate, torch_dtype
from executor.checkpoints.digest import weights_digest
from executor.checkpoints.model_config import ModelConfig, read_model_config
from executor.checkpoints.random_weights import RandomCheckpoint
from executor.config import ExecutorConfig
from executor.device.device import resolve_device
from executor.memory.kv_pool import allocate_pool, choose_num_blocks
from executor.models.decoder import Decoder
from executor.models.eager import EagerModel
from executor.models.weights import expected_shapes, load_weights
from executor.plans.limits import PlanLimits, resolve_limits, resolve_max_model_len, resolve_max_num_seqs
from kernels import reference
from kernels.memory import populate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from executor.cuda.runner import CudaRunner
    from executor.device.runner import Model, ModelRunner

Say = Callable[[str], None]
"""Prints a line about progress."""

MakeRunner = Callable[["Tensor", PlanLimits, kernels.Progress], "ModelRunner | CudaRunner"]
"""Makes a runner, and everything that its first step needs."""


@dataclass(slots=True)
class LoadedModel:
    """A runner with the facts about it: memory in bytes by kind, start-up time in seconds by phase.

    weights_digest  identifies the weights, see `executor.checkpoints.digest`
    idle_work       work to do while there is no step to run; an item takes some milliseconds
    """

    runner: "ModelRunner | CudaRunner"
    model_name: str
    dtype: torch.dtype
    device: torch.device
    weights_digest: str = ""
    memory_bytes: dict[str, int] = field(default_factory=dict)
    startup_s: dict[str, float] = field(default_factory=dict)
    idle_work: "Iterator[None] | None" = None


def load_model(config: ExecutorConfig, say: Say) -> LoadedModel:
    """Loads the model. Raises ConfigError, CheckpointError or OutOfMemory."""
    startup_s: dict[str, float] = {}
    device = resolve_device(config.device)
    with _timed(startup_s, "locate"):
        directory = locate(config.model, config.revision)
    model_config = read_model_config(directory)
    max_model_len = resolve_max_model_len(config, model_config)
    backend = _kernels(config.kernels, device)
    with _timed(startup_s, "weights"):
        decoder, num_weight_bytes = _load_decoder(config, model_config, directory, device, backend, max_model_len, say)
    shape = kernels.AttentionShape(
        dtype=decoder.dtype,
        num_heads=model_config.num_heads,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        block_size=config.block_size,
    )
    memory_bytes = {"weights": num_weight_bytes}
    make_runner: MakeRunner = partial(_make_runner, decoder, backend, shape)
    if device.type == "cuda" and config.kernels == "auto":
        max_num_seqs = resolve_max_num_seqs(config, on_cpu=False)
        make_runner, memory_bytes["step_buffers"] = _prepare_cuda(decoder, shape, max_num_seqs, max_model_len)
    with _timed(startup_s, "kv_pool"):
        num_blocks = choose_num_blocks(config, model_config, decoder.dtype, device)
        pool = allocate_pool(model_config, num_blocks, config.block_size, decoder.dtype, device)
    limits = resolve_limits(config, model_config, max_model_len, num_blocks, device.type == "cpu")
    say(
        f"KV pool: {num_blocks} blocks of {config.block_size} tokens, {pool.nbytes / 2**20:,.0f} MiB;"
        f" {limits.max_num_seqs} sequences, {limits.max_num_batched_tokens} tokens per step"
    )
    with _timed(startup_s, "kernels"):
        runner = make_runner(pool, limits, _kernel_progress(say))
    return LoadedModel(
        runner=runner,
        model_name=_model_name(config, directory),
        dtype=decoder.dtype,
        device=device,
        weights_digest=weights_digest(directory, is_random=config.load_format == "random"),
        memory_bytes=memory_bytes | {"kv_pool": pool.nbytes},
        startup_s=startup_s,
        idle_work=_idle_work(runner, pool),
    )


def _idle_work(runner: "ModelRunner | CudaRunner", pool: torch.Tensor) -> "Iterator[None] | None":
    """Returns work to do while idle, which the first steps would otherwise have to do."""
    if pool.device.type == "cpu":
        return populate(pool)
    from executor.cuda.runner import CudaRunner  # loads Triton, which a CPU host does without

    return runner.captures() if isinstance(runner, CudaRunner) else None


def _make_runner(
    decoder: Decoder,
    backend: kernels.Kernels,
    shape: kernels.AttentionShape,
    pool: "Tensor",
    limits: PlanLimits,
    progress: kernels.Progress,
) -> "ModelRunner":
    from executor.device.runner import ModelRunner  # loads numba, which a GPU host does without

    backend.warm_up(shape, progress)
    return ModelRunner(_model(decoder, backend, pool, limits), limits)


def _model(decoder: Decoder, backend: kernels.Kernels, pool: torch.Tensor, limits: PlanLimits) -> "Model":
    """Returns a program of compiled kernels for the CPU; with reference kernels, a model that runs each operation."""
    if backend is reference:
        return EagerModel(decoder, backend, pool)
    from executor.models.program import ProgramModel  # loads numba

    return ProgramModel(decoder, pool, limits.max_num_batched_tokens, limits.max_num_seqs)


def _prepare_cuda(
    decoder: Decoder, shape: kernels.AttentionShape, max_num_seqs: int, max_model_len: int
) -> tuple["MakeRunner", int]:
    """Allocates what a runner holds besides the pool, before the pool takes the rest. Returns its bytes too."""
    from executor.cuda.buffers import StepBuffers
    from executor.cuda.loading import make_runner

    buffers = StepBuffers.allocate(decoder, shape, max_num_seqs, max_model_len, decoder.device)
    return partial(make_runner, decoder, shape, buffers), buffers.num_bytes


def _load_decoder(
    config: ExecutorConfig,
    model_config: ModelConfig,
    directory: Path,
    device: torch.device,
    backend: kernels.Kernels,
    max_model_len: int,
    say: Say,
) -> tuple[Decoder, int]:
    checkpoint = _checkpoint(config, model_config, directory, device)
    dtype = _dtype(config, model_config, checkpoint)
    say(f"loading {model_config.architecture} from {directory} as {str(dtype).removeprefix('torch.')} on {device}")
    weights = load_weights(checkpoint, model_config, dtype, device, backend, _layer_progress(say))
    say(f"weights: {weights.num_bytes / 2**20:,.0f} MiB")
    return Decoder(model_config, weights, backend, max_model_len), weights.num_bytes


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


def _kernel_progress(say: Say) -> kernels.Progress:
    """Prints progress only after half a second: kernels from the cache are ready sooner."""
    quiet_until_s = time.monotonic() + 0.5

    def progress(name: str, done: int, total: int) -> None:
        if not done or time.monotonic() > quiet_until_s:
            say(f"kernels: {done} of {total} ready, now {name}")

    return progress


def _model_name(config: ExecutorConfig, directory: Path) -> str:
    if config.model_name is not None:
        return config.model_name
    return directory.resolve().name if Path(config.model).expanduser().is_dir() else config.model


@contextmanager
def _timed(durations_s: dict[str, float], phase: str) -> "Iterator[None]":
    started_s = time.monotonic()
    yield
    durations_s[phase] = time.monotonic() - started_s
