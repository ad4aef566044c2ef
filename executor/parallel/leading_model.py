"""The model of rank 0: what it computes, all ranks compute."""

from torch import Tensor

from executor.errors import RankLost
from executor.models.model import Model
from executor.parallel.channel import FrameKind
from executor.parallel.group import RankGroup
from executor.parallel.launch_frame import to_bytes
from executor.plans.plan import Ints
from executor.slots.launch import Launch


class LeadingModel:
    """Implements `executor.models.model.Model`: sends each call to the other ranks, and makes it on its own share."""

    def __init__(self, own: Model, group: RankGroup, block_size: int) -> None:
        self.own = own
        self._group = group
        self._block_size = block_size

    @property
    def pool(self) -> Tensor:
        """The pool of this rank."""
        return self.own.pool

    def forward(self, launch: Launch) -> Tensor:
        """See `Model.forward`. Raises RankLost for any error: the other ranks wait in the middle of the step."""
        self._group.send(FrameKind.FORWARD, to_bytes(launch, self._block_size))
        try:
            return self.own.forward(launch)
        except RankLost as error:
            raise self._group.lost(error) from error
        except Exception as error:
            raise RankLost(f"rank 0 failed in the middle of a step: {type(error).__name__}: {error}") from error

    def copy_blocks(self, copies: Ints) -> None:
        """See `Model.copy_blocks`."""
        self._group.send(FrameKind.COPY_BLOCKS, copies.tobytes())
        self.own.copy_blocks(copies)
