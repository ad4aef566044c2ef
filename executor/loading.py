"""Loads a model as configured into a runner that is ready for its first plan."""

import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

import kernels
from executor.checkpoints.checkpoint import Checkpoint, TensorSource, locate, torch_dtype
from executor.checkpoints.digest import WeightsCheck
from executor.checkpoints.model_config import ModelConfig, read_model_config
from executor.checkpoints.random_weights import RandomCheckpoint
from executor.config import ExecutorConfig
from executor.cuda.precision import sum_in_float32
from executor.device.device import resolve_device
from executor.grammars.grammar_cache import Grammars, load_grammars
from executor.memory.device_memory import fitting
from executor.memory.free_memory import free_memory_bytes
from executor.memory.kv_pool import allocate_pool, fitting_blocks
from executor.models.decoder import Decoder
from executor.models.eager import EagerModel
from executor.models.weights import expected_shapes, load_weights
from executor.plans.limits import PlanLimits, resolve_limits, resolve_max_model_len
from kernels import reference
from kernels.memory import populate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from executor.cuda.runner import CudaRunner
    from executor.device.runner import Model, ModelRunner

Say = Callable[[str], None]
"""Prints a line about progress."""


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


@dataclass(slots=True)
class LoadedModel:
    """A runner with the facts about it: memory in bytes by kind, start-up time in seconds by phase.

    weights_digest  identifies the weights, see `executor.checkpoints.digest`
    graphs          number of CUDA graphs: "captured", and "missing" for lack of memory
    idle_work       work to do while there is no step to run; an item takes some milliseconds
    grammars        those of the checkpoint's vocabulary; None if it has no tokenizer that can be used
    """

    runner: "ModelRunner | CudaRunner"
    model_name: str
    dtype: torch.dtype
    device: torch.device
    weights_digest: str = ""
    memory_bytes: dict[str, int] = field(default_factory=dict)
    startup_s: dict[str, float] = field(default_factory=dict)
    graphs: dict[str, int] = field(default_factory=dict)
    idle_work: "Iterator[None] | None" = None
    grammars: Grammars | None = None


def load_model(config: ExecutorConfig, say: Say) -> LoadedModel:
    """Loads the model. Raises ConfigError, CheckpointError or OutOfMemory."""
    startup_s: dict[str, float] = {}
    device = resolve_device(config.device)
    if device.type == "cuda":
        sum_in_float32()
    with _timed(startup_s, "locate"):
        directory = locate(config.model, config.revision, say)
    with WeightsCheck(directory, is_random=config.load_format == "random") as check:
        return _load(config, directory, device, check, startup_s, say)


def _load(
    config: ExecutorConfig,
    directory: Path,
    device: torch.device,
    check: WeightsCheck,
    startup_s: dict[str, float],
    say: Say,
) -> LoadedModel:
    """Loads the model of a directory whose files `check` reads meanwhile. Mutates startup_s."""
    model_config = read_model_config(directory)
    max_model_len = resolve_max_model_len(config, model_config)
    limits = resolve_limits(config, model_config, max_model_len, config.num_blocks or 0, device.type == "cpu")
    backend = _kernels(config.kernels, device)
    with _timed(startup_s, "weights"), fitting(f"weights on {device}"):
        decoder, num_weight_bytes = _load_decoder(config, model_config, directory, device, backend, max_model_len, say)
    shape = kernels.AttentionShape(
        dtype=decoder.dtype,
        num_heads=model_config.num_heads,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        block_size=config.block_size,
    )
    with _timed(startup_s, "kernels"):
        start = _start(config, decoder, backend, shape, limits, say)
    if config.num_blocks is None:
        with _timed(startup_s, "sizing"):
            free_bytes = start.free_for_pool()
        taken_bytes = {"weights": num_weight_bytes} | start.memory_bytes
        num_blocks = fitting_blocks(config, model_config, decoder.dtype, device, free_bytes, taken_bytes)
        limits = replace(limits, num_blocks=num_blocks)
    with _timed(startup_s, "kv_pool"):
        pool = allocate_pool(model_config, limits.num_blocks, config.block_size, decoder.dtype, device)
    say(
        f"KV pool: {limits.num_blocks} blocks of {config.block_size} tokens, {pool.nbytes / 2**20:,.0f} MiB;"
        f" {limits.max_num_seqs} sequences, {limits.max_num_batched_tokens} tokens per step"
    )
    with _timed(startup_s, "tokenizer"):
        grammars = load_grammars(directory, model_config.vocab_size)
    with _timed(startup_s, "runner"):
        runner = start.make_runner(pool, limits, grammars)
    with _timed(startup_s, "checksums"):
        digest = check.digest()
    return LoadedModel(
        runner=runner,
        model_name=_model_name(config, directory),
        dtype=decoder.dtype,
        device=device,
        weights_digest=digest,
        memory_bytes={"weights": num_weight_bytes} | start.memory_bytes | {"kv_pool": pool.nbytes},
        startup_s=startup_s,
        graphs=_graphs(runner),
        # On the CPU the system provides the pool's pages when they are first written, which takes time then.
        idle_work=populate(pool) if device.type == "cpu" else None,
        grammars=grammars,
    )


def _graphs(runner: "ModelRunner | CudaRunner") -> dict[str, int]:
    graphs = getattr(runner, "graphs", None)
    return {"captured": 0, "missing": 0} if graphs is None else {"captured": len(graphs), "missing": graphs.num_missing}


def _start(
    config: ExecutorConfig,
    decoder: Decoder,
    backend: kernels.Kernels,
    shape: kernels.AttentionShape,
    limits: PlanLimits,
    say: Say,
) -> Start:
    if decoder.device.type == "cuda" and config.kernels == "auto":
        from executor.cuda.loading import CudaStart  # loads Triton, which a CPU host does without

        return CudaStart(decoder, shape, limits, partial(_progress, say))
    backend.warm_up(shape, _progress(say, "kernels"))
    return PlainStart(decoder, backend)


@dataclass(frozen=True, slots=True)
class PlainStart:
    """The start of a runner that computes each step at once, and takes little memory besides weights and pool."""

    decoder: Decoder
    backend: kernels.Kernels
    memory_bytes: dict[str, int] = field(default_factory=dict)

    def free_for_pool(self) -> int:
        return free_memory_bytes(self.decoder.device)

    def make_runner(self, pool: "Tensor", limits: PlanLimits, grammars: Grammars | None) -> "ModelRunner":
        from executor.device.runner import ModelRunner  # loads numba, which a GPU host does without

        return ModelRunner(_model(self.decoder, self.backend, pool, limits), limits, grammars)


def _model(decoder: Decoder, backend: kernels.Kernels, pool: torch.Tensor, limits: PlanLimits) -> "Model":
    """Returns a program of compiled kernels for the CPU; with reference kernels, a model that runs each operation."""
    if backend is reference:
        return EagerModel(decoder, backend, pool)
    from executor.models.program import ProgramModel  # loads numba

    return ProgramModel(decoder, pool, limits.max_num_batched_tokens, limits.max_num_seqs)


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


def _progress(say: Say, phase: str) -> kernels.Progress:
    """Prints the progress of a phase only after half a second: kernels from the cache are ready sooner."""
    quiet_until_s = time.monotonic() + 0.5

    def progress(name: str, done: int, total: int) -> None:
        if not done or time.monotonic() > quiet_until_s:
            say(f"{phase}: {done} of {total} ready, now {name}")

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
