"""The persistent batch on the device: a plan's changes to a sequence are sent once and stay there.

There is one row for each slot, and one more for padding: its sequence has ended and its table is all null blocks.
"""

import numpy as np
import torch
from torch import Tensor

from executor.cuda.step_arrays import AdmittedSlots, BranchedSlots, ForkedSlots, HostArray, StepArrays, TokenEnds
from executor.plans.limits import PlanLimits
from executor.plans.plan import Admission, EndReason, Fork, Ints, StepPlan
from executor.slots.sampling_table import SamplingColumns
from kernels.triton import STATE_FIELDS, StateField, update_tables


class DeviceSlots:
    """The state, the block table and the end tokens of each slot, max_num_seqs + 1 rows of each.

    states[…, STATE_FIELDS] int32, see `kernels.triton.rows`; block_tables[…, max_blocks_per_seq] int32;
    end_kinds[…, vocab_size] uint8, the EndReason of the tokens that end a sequence.
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

    def apply(self, sent: StepArrays[Tensor]) -> None:
        """Makes the changes of `slot_changes` to the slots."""
        if sent.admitted is not None:
            self._admit(sent.admitted)
        if sent.branched is not None:
            self._branch(sent.branched)
        if sent.table_updates is not None:
            update_tables(self.block_tables, sent.table_updates)

    def fork(self, forked: ForkedSlots[Tensor] | None) -> None:
        """Makes each child a copy of its parent."""
        if forked is not None:
            self._copy(forked.parents, forked.children)

    def _admit(self, admitted: AdmittedSlots[Tensor]) -> None:
        self.states.index_copy_(0, admitted.slots, admitted.states)
        update_tables(self.block_tables, admitted.tables)
        self.end_kinds.index_fill_(0, admitted.slots, 0)
        if admitted.ends is not None:
            self.end_kinds.view(-1).index_copy_(0, admitted.ends.places, admitted.ends.kinds.to(torch.uint8))

    def _branch(self, branched: BranchedSlots[Tensor]) -> None:
        self._copy(branched.parents, branched.slots)
        states = self.states.index_select(0, branched.slots)
        states[:, StateField.LAST_TOKEN] = branched.token_ids
        states[:, StateField.NUM_TOKENS] += 1
        self.states.index_copy_(0, branched.slots, states)

    def _copy(self, sources: Tensor, destinations: Tensor) -> None:
        """Copies all slots at once: a slot may be both a source and a destination."""
        for array in (self.states, self.block_tables, self.end_kinds):
            array.index_copy_(0, destinations, array.index_select(0, sources))


def slot_changes(plan: StepPlan, limits: PlanLimits) -> StepArrays[HostArray]:
    """Returns the changes that a plan's admissions, branches, table updates and forks make to the slots."""
    return StepArrays(
        admitted=_admitted(plan.admissions, limits) if plan.admissions else None,
        branched=_branched(plan.branches) if plan.branches.size else None,
        table_updates=plan.table_updates if plan.table_updates.size else None,
        forked=_forked(plan.forks) if plan.forks else None,
    )


def _admitted(admissions: tuple[Admission, ...], limits: PlanLimits) -> AdmittedSlots[HostArray]:
    return AdmittedSlots(
        slots=np.array([admission.slot for admission in admissions], dtype=np.int64),
        states=_states(admissions, limits),
        tables=np.concatenate([_table(admission) for admission in admissions]),
        ends=_token_ends(admissions, limits),
    )


def _branched(branches: Ints) -> BranchedSlots[HostArray]:
    slots, parents, token_ids = np.ascontiguousarray(branches.T)
    return BranchedSlots(slots.astype(np.int64), parents.astype(np.int64), token_ids)


def _forked(forks: tuple[Fork, ...]) -> ForkedSlots[HostArray]:
    return ForkedSlots(
        parents=np.array([fork.parent_slot for fork in forks], dtype=np.int64),
        children=np.array([fork.child_slot for fork in forks], dtype=np.int64),
    )


def _states(admissions: tuple[Admission, ...], limits: PlanLimits) -> Ints:
    """Returns states[n, STATE_FIELDS]. Sampling parameters are found by the name of their field."""
    states = np.zeros((len(admissions), STATE_FIELDS), dtype=np.int32)
    states[:, StateField.LAST_TOKEN] = [admission.token_ids[-1] for admission in admissions]
    states[:, StateField.NUM_TOKENS] = [len(admission.token_ids) for admission in admissions]
    states[:, StateField.MAX_TOTAL_TOKENS] = [admission.params.max_total_tokens for admission in admissions]
    columns = SamplingColumns.of([admission.params for admission in admissions], limits.vocab_size)
    for name, column in columns.named:
        states[:, StateField[name.upper()]] = column.view(np.int32)
    return states


def _table(admission: Admission) -> Ints:
    """Returns (slot, logical block, physical block) for each block of the table."""
    num_blocks = len(admission.block_table)
    table = np.empty((num_blocks, 3), dtype=np.int32)
    table[:, 0] = admission.slot
    table[:, 1] = np.arange(num_blocks)
    table[:, 2] = admission.block_table
    return table


def _token_ends(admissions: tuple[Admission, ...], limits: PlanLimits) -> TokenEnds[HostArray] | None:
    """Returns the end tokens, each place once. A token that is both EOS and stop counts as EOS."""
    kinds: dict[int, int] = {}
    for admission in admissions:
        base = admission.slot * limits.vocab_size
        kinds |= {base + token: EndReason.STOP for token in admission.params.stop_token_ids.tolist()}
        kinds |= {base + token: EndReason.EOS for token in admission.params.eos_token_ids.tolist()}
    if not kinds:
        return None
    return TokenEnds(np.array(list(kinds), dtype=np.int64), np.array(list(kinds.values()), dtype=np.int32))
