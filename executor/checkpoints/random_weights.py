"""Weights out of a random number generator, in the place of a checkpoint's: the speed of a shape needs no training."""

import re
import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from executor.errors import CheckpointError

# What models are commonly initialised with: activations stay in the range that 16 bits hold.
_STANDARD_DEVIATION = 0.02


class RandomCheckpoint:
    """Tensors of given shapes: norms are ones, everything else is normal.

    They are drawn where they are going to stay, so that nothing has to be kept or copied. A name stands for the same
    numbers on every machine of one kind of device.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> None:
        self._shapes = dict(shapes)
        self._dtype = dtype
        self._device = device

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def tensor(self, name: str) -> Tensor:
        """A new tensor in the dtype and on the device."""
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        drawn = torch.empty(shape, dtype=self._dtype, device=self._device)
        return drawn.normal_(0.0, _STANDARD_DEVIATION, generator=generator)

    def check_shapes(self, expected: Mapping[str, tuple[int, ...]], ignored: re.Pattern[str]) -> None:
        """See `Checkpoint.check_shapes`. Raises CheckpointError for shapes other than those it was made with."""
        if expected != self._shapes:
            raise CheckpointError("random weights were made for another configuration")
