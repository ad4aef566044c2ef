"""Sampling on the device: chooses the tokens that `executor.sampling.sampler` would, without reading on the host.

Each row gets its most likely token first; rows that draw then get another one. The parameters of a row are on the
device, in its slot. Only uniform numbers are sent, and no shape depends on the parameters.
"""

import numpy as np
import torch
from torch import Tensor

from executor.cuda.device_slots import DeviceSlots
from executor.cuda.step_arrays import ChangedRows, HostArray, SamplingArrays, send
from executor.cuda.upload import Upload
from executor.slots.sampling_table import Draw
from kernels.triton import choose_greedily, draw_tokens

# Logits handled at once: limits the temporaries of large batches over large vocabularies to about 300 MB.
MAX_NUMBERS = 1 << 23


def sampling_arrays(draw: Draw) -> SamplingArrays[HostArray] | None:
    """Returns the arrays of a draw that are not in its slots; None if there are none."""
    if draw.is_plain_greedy:
        return None
    return SamplingArrays(
        banned=np.array([row for row, _ in draw.banned], dtype=np.int64) if draw.banned else None,
        uniforms=None if draw.is_greedy else draw.uniforms,
    )


def sample(
    logits: Tensor,
    slots: Tensor,
    on_device: DeviceSlots,
    sent: SamplingArrays[Tensor] | None,
    token_ids: Tensor,
) -> None:
    """Samples token_ids[R] int32 for slots[R] int32 from logits[R, vocab_size].

    Mutates token_ids and the banned logits. Launches a few kernels, and waits for none of them.
    """
    if sent is not None and sent.banned is not None:
        _ban(logits, slots, on_device, sent.banned)
    choose_greedily(logits, token_ids)
    if sent is not None and sent.uniforms is not None:
        draw_tokens(logits, on_device.states, slots, sent.uniforms, token_ids)


def sample_changed(
    draw: Draw, logits: Tensor, slots: Tensor, on_device: DeviceSlots, upload: Upload, token_ids: Tensor
) -> None:
    """Samples the rows that change their logits a second time, from logits[R, vocab_size] as the model made them.

    Mutates token_ids[R] int32.
    """
    for part in draw.changes.parts(MAX_NUMBERS) if draw.changes is not None else ():
        sent = send(ChangedRows(part.rows.astype(np.int64), sampling_arrays(draw.unchanged(part.rows))), upload)
        own_ids = torch.empty(len(part.rows), dtype=torch.int32, device=logits.device)
        sample(part.changed(logits), slots.index_select(0, sent.rows), on_device, sent.sampling, own_ids)
        token_ids.index_copy_(0, sent.rows, own_ids)


def _ban(logits: Tensor, slots: Tensor, on_device: DeviceSlots, rows: Tensor) -> None:
    """Sets the logits of all tokens that would end these rows to -inf."""
    for some in torch.split(rows, max(1, MAX_NUMBERS // logits.shape[1])):
        ends = on_device.end_kinds.index_select(0, slots.index_select(0, some)) != 0
        logits.index_copy_(0, some, logits.index_select(0, some).masked_fill(ends, -torch.inf))
