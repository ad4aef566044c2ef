"""The agreement of a rank with the others while it loads its share of the model."""

from dataclasses import dataclass
from typing import Protocol

from executor.checkpoints.model_config import ModelConfig
from executor.checkpoints.shares import Share, share_of
from executor.models.communicator import Communicator


class Ranks(Protocol):
    """The group as one of its ranks sees it. All ranks call `connect`, then `least` or not, as the settings say."""

    def share(self, model: ModelConfig) -> Share:
        """Returns the share of this rank. Raises ConfigError if the model cannot be divided."""
        ...

    def connect(self, share: Share, vocab_size: int, memory_bytes: dict[str, int]) -> Communicator | None:
        """Waits until all ranks have loaded their weights. Returns None if there is one rank.

        memory_bytes: what this rank has loaded. Raises RankLost, and the error for which another rank could not load.
        """
        ...

    def least(self, num_blocks: int) -> int:
        """Returns the least number of blocks that fit on a rank. Raises RankLost."""
        ...


@dataclass(frozen=True, slots=True)
class OneRank:
    """The group of an executor that is not divided."""

    def share(self, model: ModelConfig) -> Share:
        return share_of(model, rank=0, size=1)

    def connect(self, share: Share, vocab_size: int, memory_bytes: dict[str, int]) -> Communicator | None:
        return None

    def least(self, num_blocks: int) -> int:
        return num_blocks
