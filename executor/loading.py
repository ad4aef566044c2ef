"""Loads a model as configured into a runner that is ready for its first plan."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from executor.checkpoints.checkpoint import locate
from executor.checkpoints.digest import WeightsCheck
from executor.checkpoints.model_config import read_model_config
from executor.checkpoints.shares import share_of
from executor.config import ExecutorConfig
from executor.cuda.precision import sum_in_float32
from executor.device.device import resolve_device
from executor.errors import ConfigError
from executor.grammars.grammar_cache import Grammars, load_grammars
from executor.models.model import Model
from executor.parallel.group import RankGroup
from executor.parallel.leading_model import LeadingModel
from executor.parallel.ranks import OneRank
from executor.share_loading import LoadedShare, Say, load_share, timed
from kernels.memory import populate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from executor.cuda.runner import CudaRunner
    from executor.device.runner import ModelRunner


@dataclass(slots=True)
class LoadedModel:
    """A runner with the facts about it: memory in bytes by kind, start-up time in seconds by phase.

    weights_digest  identifies the weights, see `executor.checkpoints.digest`
    graphs          number of CUDA graphs: "captured", and "missing" for lack of memory
    idle_work       work to do while there is no step to run; an item takes some milliseconds
    grammars        those of the checkpoint's vocabulary; None if it has no tokenizer that can be used
    group           the other ranks, if the model is divided; the memory is that of all ranks, the runner that of rank 0
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
    group: RankGroup | None = None

    def close(self) -> None:
        """Ends the other ranks."""
        if self.group is not None:
            self.group.close()


def load_model(config: ExecutorConfig, say: Say) -> LoadedModel:
    """Loads the model. Raises ConfigError, CheckpointError, OutOfMemory, and RankLost if another rank ends.

    With ranks of other machines also AddressInUse and AddressUnusable.
    """
    startup_s: dict[str, float] = {}
    device = resolve_device(config.device)
    if device.type == "cuda":
        sum_in_float32()
    with timed(startup_s, "locate"):
        directory = locate(config.model, config.revision, say)
    with WeightsCheck(directory, is_random=config.load_format == "random") as check:
        if config.tensor_parallel_size == 1:
            return _load(config, directory, device, None, check, startup_s, say)
        check_divisible(config, directory, device)
        group = RankGroup(config, directory, say)
        try:
            return _load(config, directory, device, group, check, startup_s, say)
        except BaseException:
            group.close(at_once=True)  # ranks that load do not look at their channels
            raise


def check_divisible(config: ExecutorConfig, directory: Path, device: torch.device) -> None:
    """Raises ConfigError if the model cannot be divided, before any other rank starts."""
    if device.type != "cpu":
        raise ConfigError(f"tensor_parallel_size: ranks compute on CPUs only, and the device is {device}")
    share_of(read_model_config(directory), rank=0, size=config.tensor_parallel_size)


def _load(
    config: ExecutorConfig,
    directory: Path,
    device: torch.device,
    group: RankGroup | None,
    check: WeightsCheck,
    startup_s: dict[str, float],
    say: Say,
) -> LoadedModel:
    """Loads the model of a directory whose files `check` reads meanwhile. Mutates startup_s."""

    def lead(own: Model) -> Model:
        return own if group is None else LeadingModel(own, group, config.block_size)

    share = load_share(config, directory, device, group or OneRank(), lead, startup_s, say)
    with timed(startup_s, "tokenizer"):
        grammars = load_grammars(directory, share.limits.vocab_size)
    with timed(startup_s, "runner"):
        runner = share.start.make_runner(share.pool, share.limits, grammars)
    with timed(startup_s, "checksums"):
        digest = check.digest()
    if group is not None:
        group.await_ready(digest)
    return LoadedModel(
        runner=runner,
        model_name=_model_name(config, directory),
        dtype=share.decoder.dtype,
        device=device,
        weights_digest=digest,
        memory_bytes=_memory_bytes(share, group),
        startup_s=startup_s,
        graphs=_graphs(runner),
        # On the CPU the system provides the pool's pages when they are first written, which takes time then.
        idle_work=populate(share.pool) if device.type == "cpu" else None,
        grammars=grammars,
        group=group,
    )


def _memory_bytes(share: LoadedShare, group: RankGroup | None) -> dict[str, int]:
    """Returns the memory of all ranks by kind. Their pools have the same number of blocks."""
    weights, pool = share.decoder.weights.num_bytes, share.pool.nbytes
    for member in () if group is None else group.members:
        weights += member.memory_bytes["weights"]
        pool += member.memory_bytes["kv_block"] * share.limits.num_blocks
    return {"weights": weights} | share.start.memory_bytes | {"kv_pool": pool}


def _graphs(runner: "ModelRunner | CudaRunner") -> dict[str, int]:
    graphs = getattr(runner, "graphs", None)
    return {"captured": 0, "missing": 0} if graphs is None else {"captured": len(graphs), "missing": graphs.num_missing}


def _model_name(config: ExecutorConfig, directory: Path) -> str:
    if config.model_name is not None:
        return config.model_name
    return directory.resolve().name if Path(config.model).expanduser().is_dir() else config.model
