"""The persistent batch as the device has it: what plans say of a sequence goes there once, and stays.

One row a slot, and one more that is nobody's: it has ended, its table is all null blocks, and padding rows name it.
"""

import numpy as np
import torch
from torch import Tensor

from executor.cuda.upload import Arrays
from executor.plans.limits import Limits
from executor.plans.plan import Admission, EndReason, Fork, Ints, StepPlan
from kernels.triton import STATE_FIELDS, StateField, update_tables


class DeviceSlots:
    """states[max_num_seqs + 1, STATE_FIELDS] int32, see `kernels.triton.rows`; block_tables[max_num_seqs + 1,
    max_blocks_per_seq] int32; end_kinds[max_num_seqs + 1, vocab_size] uint8, the EndReason of the tokens that end a
    sequence.
    """

    def __init__(self, max_num_seqs: int, max_blocks_per_seq: int, vocab_size: int, device: torch.device) -> None:
        num_rows = max_num_seqs + 1
        self.padding_slot = max_num_seqs
        self.states = torch.zeros((num_rows, STATE_FIELDS), dtype=torch.int32, device=device)
        self.states[:, StateField.HAS_ENDED] = 1
        self.block_tables = torch.zeros((num_rows, max_blocks_per_seq), dtype=torch.int32, device=device)
        self.end_kinds = torch.zeros((num_rows, vocab_size), dtype=torch.uint8, device=device)

    @property
    def num_bytes(self) -> int:
        return self.states.nbytes + self.block_tables.nbytes + self.end_kinds.nbytes

    def apply(self, sent: dict[str, Tensor]) -> None:
        """The arrays of `slot_deltas`, now on the device."""
        if "admitted_slots" in sent:
            slots = sent["admitted_slots"]
            self.states.index_copy_(0, slots, sent["admitted_states"])
            update_tables(self.block_tables, sent["admitted_tables"])
            self.end_kinds.index_fill_(0, slots, 0)
            if "end_places" in sent:
                kinds = sent["end_kinds"].to(torch.uint8)
                self.end_kinds.view(-1).index_copy_(0, sent["end_places"], kinds)
        if "branch_slots" in sent:
            slots = sent["branch_slots"]
            self._copy(sent["branch_parents"], slots)
            own = self.states.index_select(0, slots)
            own[:, StateField.LAST_TOKEN] = sent["branch_tokens"]
            own[:, StateField.NUM_TOKENS] += 1
            self.states.index_copy_(0, slots, own)
        if "table_updates" in sent:
            update_tables(self.block_tables, sent["table_updates"])

    def fork(self, sent: dict[str, Tensor]) -> None:
        """The arrays of `fork_deltas`: children become what their parents are."""
        if "parents" in sent:
            self._copy(sent["parents"], sent["children"])

    def _copy(self, sources: Tensor, destinations: Tensor) -> None:
        """All at once: a slot may be a source and a destination."""
        for array in (self.states, self.block_tables, self.end_kinds):
            array.index_copy_(0, destinations, array.index_select(0, sources))


def slot_deltas(plan: StepPlan, limits: Limits) -> Arrays:
    """What a plan's admissions, branches and table updates change, as arrays to send. Empty ones are left out."""
    deltas: Arrays = {}
    if plan.admissions:
        deltas["admitted_slots"] = np.array([admission.slot for admission in plan.admissions], dtype=np.int64)
        deltas["admitted_states"] = np.stack([_state(admission, limits) for admission in plan.admissions])
        deltas["admitted_tables"] = np.concatenate([_table(admission) for admission in plan.admissions])
        places, kinds = _end_kinds(plan.admissions, limits)
        if places:
            deltas["end_places"] = np.array(places, dtype=np.int64)
            deltas["end_kinds"] = np.array(kinds, dtype=np.int32)
    if plan.branches.size:
        slots, parents, token_ids = np.ascontiguousarray(plan.branches.T)
        deltas["branch_slots"], deltas["branch_parents"] = slots.astype(np.int64), parents.astype(np.int64)
        deltas["branch_tokens"] = token_ids
    if plan.table_updates.size:
        deltas["table_updates"] = plan.table_updates
    return deltas


def fork_deltas(forks: tuple[Fork, ...]) -> Arrays:
    if not forks:
        return {}
    return {
        "parents": np.array([fork.parent_slot for fork in forks], dtype=np.int64),
        "children": np.array([fork.child_slot for fork in forks], dtype=np.int64),
    }


def _state(admission: Admission, limits: Limits) -> Ints:
    params = admission.params
    state = np.zeros(STATE_FIELDS, dtype=np.int32)
    state[StateField.LAST_TOKEN] = admission.token_ids[-1]
    state[StateField.NUM_TOKENS] = len(admission.token_ids)
    state[StateField.MAX_TOTAL_TOKENS] = params.max_total_tokens
    state[StateField.TOP_K] = params.top_k if params.top_k < limits.vocab_size else 0
    floats = state.view(np.float32)
    floats[StateField.TEMPERATURE] = params.temperature
    floats[StateField.TOP_P] = params.top_p
    floats[StateField.MIN_P] = params.min_p
    return state


def _table(admission: Admission) -> Ints:
    """(slot, logical block, physical block) of the whole table."""
    num_blocks = len(admission.block_table)
    table = np.empty((num_blocks, 3), dtype=np.int32)
    table[:, 0] = admission.slot
    table[:, 1] = np.arange(num_blocks)
    table[:, 2] = admission.block_table
    return table


def _end_kinds(admissions: tuple[Admission, ...], limits: Limits) -> tuple[list[int], list[int]]:
    """Flat places in end_kinds, each once, and what belongs there. A token that is both EOS and stop is EOS."""
    kinds: dict[int, int] = {}
    for admission in admissions:
        base = admission.slot * limits.vocab_size
        kinds |= {base + token: EndReason.STOP for token in admission.params.stop_token_ids.tolist()}
        kinds |= {base + token: EndReason.EOS for token in admission.params.eos_token_ids.tolist()}
    return list(kinds), list(kinds.values())
