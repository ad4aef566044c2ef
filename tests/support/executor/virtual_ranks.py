"""All ranks of a group in one process: each is a thread that computes its share, and sums are written out by hand.

This is the specification of a group: its tokens are those of one rank, and its bits are those of a group of processes.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from executor.checkpoints.shares import Share, share_of
from executor.config import ExecutorConfig
from executor.device.runner import ModelRunner
from executor.parallel.launch_frame import from_bytes, to_bytes
from executor.share_loading import LoadedShare, load_share

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from executor.checkpoints.model_config import ModelConfig
    from executor.models.communicator import Communicator
    from executor.plans.plan import Ints
    from executor.slots.launch import Launch

_WAIT_S = 60.0


@dataclass(slots=True)
class MeetingPoint:
    """The memory that the ranks share: what each has put there, and barriers before and after reading."""

    size: int
    parts: list[torch.Tensor | None] = field(default_factory=list)
    barrier: threading.Barrier = field(init=False)

    def __post_init__(self) -> None:
        self.parts = [None] * self.size
        self.barrier = threading.Barrier(self.size)

    def exchange(self, rank: int, own: torch.Tensor) -> list[torch.Tensor]:
        """Returns copies of the tensors of all ranks, by rank."""
        self.parts[rank] = own
        self.barrier.wait(_WAIT_S)
        copies = [part.clone() for part in self.parts if part is not None]
        self.barrier.wait(_WAIT_S)
        return copies


@dataclass(frozen=True, slots=True)
class VirtualCommunicator:
    """Implements `executor.models.communicator.Communicator`."""

    share: Share
    meeting: MeetingPoint

    def sum(self, partial: torch.Tensor) -> None:
        parts = [part.float().numpy() for part in self.meeting.exchange(self.share.rank, partial)]
        total = np.zeros_like(parts[0])
        for index in np.ndindex(*total.shape[:1]):
            total[index] = parts[0][index]
            for part in parts[1:]:
                total[index] = total[index] + part[index]
        partial.copy_(torch.from_numpy(total))

    def gather(self, own: torch.Tensor, logits: torch.Tensor | None) -> None:
        parts = self.meeting.exchange(self.share.rank, own)
        if logits is not None:
            logits.copy_(torch.cat(parts, dim=1))


@dataclass(frozen=True, slots=True)
class VirtualRank:
    """The group as a virtual rank sees it. Implements `executor.parallel.ranks.Ranks`."""

    rank: int
    meeting: MeetingPoint

    def share(self, model: ModelConfig) -> Share:
        return share_of(model, self.rank, self.meeting.size)

    def connect(self, share: Share, vocab_size: int, memory_bytes: dict[str, int]) -> Communicator:
        return VirtualCommunicator(share, self.meeting)

    def least(self, num_blocks: int) -> int:
        return num_blocks


class VirtualModel:
    """Implements `executor.models.model.Model`. Each rank gets the bytes of a launch, as another process would."""

    def __init__(self, shares: list[LoadedShare], block_size: int) -> None:
        self.models = [share.make_model() for share in shares]
        self.pool = self.models[0].pool
        self._block_size = block_size
        self._threads = ThreadPoolExecutor(len(shares))

    def forward(self, launch: Launch) -> torch.Tensor:
        payload = bytearray(to_bytes(launch, self._block_size))
        return self._all(lambda model: model.forward(from_bytes(payload)))[0]

    def copy_blocks(self, copies: Ints) -> None:
        self._all(lambda model: model.copy_blocks(copies))

    def _all(self, call: Callable[[Any], Any]) -> list[Any]:
        def one_rank(model: Any) -> Any:
            torch.set_num_threads(1)
            with torch.inference_mode():
                return call(model)

        return list(self._threads.map(one_rank, self.models))


def virtual_runner(directory: Path, size: int, **settings: Any) -> ModelRunner:
    """Returns a runner whose ranks are all in this process."""
    defaults = {"kernels": "reference", "block_size": 4, "num_blocks": 200, "max_num_seqs": 8, "device": "cpu"}
    config = ExecutorConfig(model=str(directory), **{**defaults, **settings})
    meeting = MeetingPoint(size)

    def load(rank: int) -> LoadedShare:
        device = torch.device("cpu")
        return load_share(config, directory, device, VirtualRank(rank, meeting), lambda own: own, {}, lambda line: None)

    shares = [load(rank) for rank in range(size)]
    return ModelRunner(VirtualModel(shares, config.block_size), shares[0].limits)
