"""Computes logits from the rows of a step: decode-only steps use fixed buffers, all others use new tensors."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from executor.cuda.buffers import DecodeRows
from executor.cuda.device_slots import DeviceSlots
from executor.cuda.step_arrays import HostArray, MixedRows
from executor.models.decoder import Decoder, Rows
from executor.slots.slots import Slots
from executor.slots.step_inputs import StepInputs
from kernels import AttentionShape
from kernels.triton import (
    DecodePlanner,
    DecodeWork,
    PrefillWork,
    attend_decode,
    attend_prefill,
    list_tiles,
    open_rows,
)
from kernels.triton.tuning import prefill_tuning


@dataclass(frozen=True, slots=True)
class Forward:
    """The model and its pool. Mutates the pool, and the buffers of `planner` and `rows`."""

    model: Decoder
    pool: Tensor
    shape: AttentionShape
    planner: DecodePlanner
    on_device: DeviceSlots
    rows: DecodeRows

    def decode(self, num_rows: int) -> Tensor:
        """Returns the logits of rows.slots[:num_rows], padding included.

        Can be captured: the launches do not depend on the contents of the rows.
        """
        rows, tables = self.rows, self.on_device.block_tables
        slots, context_lens = rows.slots[:num_rows], rows.context_lens[:num_rows]
        token_ids, positions = rows.token_ids[:num_rows], rows.positions[:num_rows]
        slot_mapping = rows.slot_mapping[:num_rows]
        open_rows(
            self.on_device.states,
            tables,
            slots,
            token_ids,
            positions,
            context_lens,
            slot_mapping,
            self.shape.block_size,
        )
        work = self.planner.plan(tables, context_lens, slots)
        own = Rows(token_ids, positions, slot_mapping)
        return self.model.forward(own, self.pool, partial(_attend, work, None, num_rows))

    def mixed(self, num_decodes: int, sent: MixedRows[Tensor]) -> Tensor:
        """Returns the hidden states of the step's `logit_rows`: [L, hidden_size]."""
        tables, row_slots = self.on_device.block_tables, sent.row_slots
        token_ids, positions, context_lens = (torch.empty_like(row_slots) for _ in range(3))
        slot_mapping = torch.empty(len(row_slots), dtype=torch.int64, device=row_slots.device)
        open_rows(
            self.on_device.states,
            tables,
            row_slots,
            token_ids,
            positions,
            context_lens,
            slot_mapping,
            self.shape.block_size,
            sent.known_rows,
        )
        decodes = self.planner.plan(tables, context_lens[:num_decodes], row_slots[:num_decodes])
        prefills = None
        if sent.tiles is not None:
            prefills = PrefillWork(tables, sent.tiles, prefill_tuning(self.shape, tables.device))
        rows = Rows(token_ids, positions, slot_mapping, sent.logit_rows)
        return self.model.hidden(rows, self.pool, partial(_attend, decodes, prefills, num_decodes))

    def mixed_rows(self, step: StepInputs, slots: Slots) -> MixedRows[HostArray]:
        """Returns the arrays to send for a step that is not decode-only."""
        row_slots, positions, num = step.row_slots, step.positions, step.num_decodes
        tiles = None
        if len(step.slots) > num:
            query_starts = step.query_starts[num:] - step.query_starts[num]
            tiles = list_tiles(self.shape, self.pool.device, query_starts, step.context_lens[num:], step.slots[num:])
        return MixedRows(
            row_slots=row_slots,
            # Tokens that only the device knows are negative on the host: such rows take the slot's last token.
            known_rows=np.stack((slots.token_ids[row_slots, positions], positions)),
            logit_rows=step.logit_rows,
            sampling=step.sampling,
            sampled_logits=step.sampled_logits if step.has_forks else None,
            tiles=tiles,
        )


def _attend(
    decodes: DecodeWork,
    prefills: PrefillWork | None,
    num_decodes: int,
    query: Tensor,
    kv: Tensor,
    out: Tensor,
    scale: float,
    window: int,
) -> None:
    """Computes the attention of a planned step, see `executor.models.decoder.Attend`."""
    if num_decodes:
        attend_decode(query[:num_decodes], kv, decodes, out[:num_decodes], scale, window)
    if prefills is not None:
        attend_prefill(query[num_decodes:], kv, prefills, out[num_decodes:], scale, window)
