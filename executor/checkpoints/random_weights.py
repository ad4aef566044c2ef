"""Random weights in place of a checkpoint's, to measure the speed of a model without its weights."""

import re
import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from executor.checkpoints.checkpoint import of_part
from executor.checkpoints.shares import Span
from executor.errors import CheckpointError

# The usual initialisation of models: activations stay in the range of 16-bit floats.
_STANDARD_DEVIATION = 0.02


class RandomCheckpoint:
    """Tensors of given shapes: norms are ones, all others are normally distributed.

    They are drawn on the device, so nothing has to be copied. A name gives the same numbers on all machines with the
    same kind of device.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> None:
        self._shapes = dict(shapes)
        self._dtype = dtype
        self._device = device

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def tensor(self, name: str) -> Tensor:
        """Returns a new tensor in the dtype and on the device."""
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        drawn = torch.empty(shape, dtype=self._dtype, device=self._device)
        return drawn.normal_(0.0, _STANDARD_DEVIATION, generator=generator)

    def part(self, name: str, rows: Span | None, columns: Span | None) -> Tensor:
        """Returns a part of the tensor. The whole of it is drawn, so that its numbers do not depend on the part."""
        return of_part(self.tensor(name), rows, columns).clone()

    def check_shapes(self, expected: Mapping[str, tuple[int, ...]], ignored: re.Pattern[str]) -> None:
        """See `Checkpoint.check_shapes`. Raises CheckpointError for shapes other than those of its configuration."""
        if expected != self._shapes:
            raise CheckpointError("random weights were made for another configuration")
