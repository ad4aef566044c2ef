"""Sampling on the device: chooses the tokens that `executor.sampling.sampler` would choose, without a host read.

Every row gets its likeliest token; rows that are to draw get another one. Which parameters a row has is on the device,
in its slot: nothing but the uniform numbers is sent, and nothing has a shape that depends on them.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor.cuda.device_slots import DeviceSlots
from executor.cuda.upload import Arrays
from executor.slots.sampling_table import Draw
from kernels.triton import choose_greedily, draw_tokens

# Numbers handled at once: bounds the temporaries of large batches over large vocabularies to some 300 MB.
MAX_NUMBERS = 1 << 23


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a step's sampling needs to be told. banned: rows too short to end, whose end ids get -inf."""

    is_greedy: bool
    banned: NDArray[np.int64]
    uniforms: NDArray[np.float32]

    @classmethod
    def of(cls, draw: Draw) -> "Recipe":
        return cls(
            is_greedy=draw.is_greedy,
            banned=np.array([row for row, _ in draw.banned], dtype=np.int64),
            uniforms=draw.uniforms,
        )

    @property
    def is_plain_greedy(self) -> bool:
        """Nothing but the largest logit of each row is asked for."""
        return self.is_greedy and not self.banned.size

    def arrays(self) -> Arrays:
        """What the device has to be sent, and `sample` to be given back as tensors."""
        arrays: Arrays = {}
        if self.banned.size:
            arrays["banned"] = self.banned
        if not self.is_greedy:
            arrays["uniforms"] = self.uniforms
        return arrays


def sample(
    logits: Tensor, slots: Tensor, on_device: DeviceSlots, recipe: Recipe, sent: dict[str, Tensor], token_ids: Tensor
) -> None:
    """logits[R, vocab_size] of slots[R] int32 → token_ids[R] int32. Mutates token_ids, and banned logits.

    Launches a few kernels, and waits for none of them.
    """
    if recipe.banned.size:
        _ban(logits, slots, on_device, sent["banned"])
    choose_greedily(logits, token_ids)
    if not recipe.is_greedy:
        draw_tokens(logits, on_device.states, slots, sent["uniforms"], token_ids)


def _ban(logits: Tensor, slots: Tensor, on_device: DeviceSlots, rows: Tensor) -> None:
    """-inf for all tokens that would end these rows."""
    for some in torch.split(rows, max(1, MAX_NUMBERS // logits.shape[1])):
        ends = on_device.end_kinds.index_select(0, slots.index_select(0, some)) != 0
        logits.index_copy_(0, some, logits.index_select(0, some).masked_fill(ends, -torch.inf))
