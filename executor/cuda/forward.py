"""From the rows of a step to logits: decodes on buffers that stay where they are, everything else on new ones."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from executor.cuda.device_slots import DeviceSlots
from executor.cuda.host_step import HostStep
from executor.cuda.upload import Arrays
from executor.models.decoder import Decoder, Rows
from executor.slots.slots import Slots
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


class DecodeRows:
    """Buffers for the rows of decode steps, max_num_seqs of each. `slots` is what is sent; the rest is computed."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        def numbers(dtype: torch.dtype) -> Tensor:
            return torch.zeros(max_num_seqs, dtype=dtype, device=device)

        self.slots = numbers(torch.int32)
        self.token_ids = numbers(torch.int32)
        self.positions = numbers(torch.int32)
        self.context_lens = numbers(torch.int32)
        self.slot_mapping = numbers(torch.int64)


@dataclass(frozen=True, slots=True)
class Forward:
    """The model over its pool. Mutates the pool, and what planner and rows hold."""

    model: Decoder
    pool: Tensor
    shape: AttentionShape
    planner: DecodePlanner
    on_device: DeviceSlots
    rows: DecodeRows

    def decode(self, num_rows: int) -> Tensor:
        """Logits of rows.slots[:num_rows], padding included. Can be captured: nothing depends on what rows hold."""
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

    def mixed(self, num_decodes: int, sent: dict[str, Tensor]) -> Tensor:
        """What logits are made of, [rows, hidden_size], of rows of any step, with the arrays of `mixed_rows` there: of
        those that sample, of beams, and of prompts."""
        tables, row_slots = self.on_device.block_tables, sent["row_slots"]
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
            sent["known_rows"],
        )
        decodes = self.planner.plan(tables, context_lens[:num_decodes], row_slots[:num_decodes])
        prefills = None
        if "tiles" in sent:
            prefills = PrefillWork(tables, sent["tiles"], prefill_tuning(self.shape, tables.device))
        rows = Rows(token_ids, positions, slot_mapping, sent["sample_rows"])
        return self.model.hidden(rows, self.pool, partial(_attend, decodes, prefills, num_decodes))

    def mixed_rows(self, step: HostStep, slots: Slots) -> Arrays:
        """What the device has to be sent of a step that has prefills, or children."""
        starts, row_slots = step.starts, np.repeat(step.order, step.counts)
        positions = np.arange(starts[-1], dtype=np.int32)
        positions += np.repeat(step.first_positions - starts[:-1], step.counts)
        # Tokens that only the device knows are negative in the books: those rows take the slot's last token.
        known = np.stack((slots.token_ids[row_slots, positions], positions))
        sample_rows = np.concatenate((step.sample_rows, step.beam_rows, step.prompt_rows))
        arrays: Arrays = {"row_slots": row_slots, "known_rows": known, "sample_rows": sample_rows}
        if len(step.order) > step.num_decodes:
            num = step.num_decodes
            lengths = step.first_positions[num:] + step.counts[num:]
            query_starts = starts[num:] - starts[num]
            device = self.pool.device
            arrays["tiles"] = list_tiles(self.shape, device, query_starts, lengths, step.order[num:])
        return arrays


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
    """The attention of a planned step, see `executor.models.decoder.Attend`."""
    if num_decodes:
        attend_decode(query[:num_decodes], kv, decodes, out[:num_decodes], scale, window)
    if prefills is not None:
        attend_prefill(query[num_decodes:], kv, prefills, out[num_decodes:], scale, window)
