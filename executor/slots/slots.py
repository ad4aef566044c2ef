"""The persistent batch: the state of every sequence that has a slot.

It is a cache of the plan stream and decides nothing. `apply` makes effects 1 to 4 and 6 of a plan (they are listed at
the top of protos/quire/executor/v1/executor.proto); `advance`, `fork` and `append` make the changes of the step itself.
The counters tell which part of the arrays is valid.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from executor.grammars.grammar_cache import Grammars
from executor.grammars.grammar_table import GrammarTable
from executor.plans.limits import PlanLimits
from executor.plans.plan import EndReason, Fork, Ints, Publication, StepPlan
from executor.plans.plan_check import project
from executor.plans.retained_blocks import RetainedBlocks
from executor.plans.slot_counters import SlotCounters
from executor.plans.written_blocks import WrittenBlocks, blocks_to_write
from executor.slots.logit_changes import ChangeTable
from executor.slots.report_table import PromptSpans, ReportTable
from executor.slots.sampling_table import Draw, SamplingTable


class Slots:
    """The arrays token_ids[max_num_seqs, max_model_len], block_tables[max_num_seqs, max_blocks_per_seq], and counters.

    The system provides the pages of both matrices only when they are written. The other attributes describe the step
    that was applied last, by ascending slot:

    computing     slots that compute tokens
    overrun       slots that have ended but still have rows: nothing is written, and their results are meaningless
    sampling      slots that reach their last known token and sample the next one
    beams         slots that reach their last known token and report candidates instead
    prompt_spans  rows whose prompt tokens are to be reported; None if there are none
    """

    def __init__(self, limits: PlanLimits, grammars: Grammars | None = None) -> None:
        """Starts with empty slots. `grammars` is None if the model has no tokenizer that can be used."""
        self.limits = limits
        self.counters = SlotCounters.empty(limits.max_num_seqs)
        self.token_ids = np.zeros((limits.max_num_seqs, limits.max_model_len), dtype=np.int32)
        self.block_tables = np.zeros((limits.max_num_seqs, limits.max_blocks_per_seq), dtype=np.int32)
        self.reports = ReportTable(limits.max_num_seqs)
        self._written = WrittenBlocks(limits)
        self._retained = RetainedBlocks(limits.num_blocks)
        self._sampling = SamplingTable(limits.max_num_seqs, limits.vocab_size)
        self._changes = ChangeTable(limits.max_num_seqs, limits.vocab_size)
        self._grammars = GrammarTable(limits.vocab_size, grammars)
        self.classify()

    def clear(self, digest_scheme: str = "", *, is_trusted: bool = True) -> Publication:
        """Empties all slots for a new lease, which has written no block yet. Returns the blocks that it may use.

        These are the blocks that were published under the same scheme, if the pool is trusted: no step has failed.
        """
        self.counters = SlotCounters.empty(self.limits.max_num_seqs)
        self._retained.begin(digest_scheme, is_trusted=is_trusted)
        retained = self._retained.all()
        self._written.clear(retained.blocks)
        self._sampling.clear()
        self._changes.clear()
        self._grammars.clear()
        self.reports.clear()
        self.classify()
        return retained

    def apply(self, plan: StepPlan) -> None:
        """Retires, admits, branches, and sets table entries and row counts.

        Raises PlanRejected, in which case nothing has changed.
        """
        counters = project(plan, self.counters, self.limits)
        self._written.check(plan, self.counters, counters, self.block_tables)
        self._retained.check(plan)
        self.counters = counters
        self._written.apply(plan, counters)
        self._changes.drop(plan.retired_slots.tolist())
        self._grammars.begin_step()
        self._grammars.drop(plan.retired_slots)
        self.reports.drop(plan.retired_slots)
        for admission in plan.admissions:
            self.token_ids[admission.slot, : len(admission.token_ids)] = admission.token_ids
            self.block_tables[admission.slot, : len(admission.block_table)] = admission.block_table
            self._sampling.set(admission.slot, admission.params)
            self._changes.set(admission.slot, admission.params, admission.token_ids)
            self._grammars.set(admission.slot, admission.params, admission.token_ids)
            self.reports.set(admission.slot, admission.params)
        if plan.branches.size:
            self._branch(*plan.branches.T)
        if plan.table_updates.size:
            slots, logical, physical = plan.table_updates.T
            self.block_tables[slots, logical] = physical
        self.classify()
        self._retain(plan)

    def _retain(self, plan: StepPlan) -> None:
        """Keeps the digests that a plan publishes, and forgets those of blocks that it writes to or takes to write to.

        A taken block may stay unwritten, because its sequence has ended, but the scheduler does not know its contents
        any more.
        """
        self._retained.apply(plan)
        if not self._retained:
            return
        block_size = self.limits.block_size
        self._retained.forget(plan.block_copies[:, 1])
        self._retained.forget(plan.table_updates[:, 2])
        for admission in plan.admissions:
            self._retained.forget(admission.block_table[admission.num_computed_tokens // block_size :])
        self._retained.forget(blocks_to_write(self.counters, self.computing, self.block_tables, block_size))

    def _branch(self, slots: Ints, parents: Ints, token_ids: Ints) -> None:
        """Branches everything but the counters, which have branched already."""
        self._copy_slots(parents, slots)
        self.token_ids[slots, self.counters.num_tokens[slots] - 1] = token_ids
        self._changes.count(slots, token_ids)
        self._grammars.consume(slots, token_ids)
        self._grammars.begin_masks()

    def _copy_slots(self, sources: Ints, destinations: Ints) -> None:
        """Copies everything but the counters, which have been copied already."""
        num_tokens = int(self.counters.num_tokens[destinations].max())
        num_blocks = int(self.counters.num_blocks[destinations].max())
        self.token_ids[destinations, :num_tokens] = self.token_ids[sources, :num_tokens]
        self.block_tables[destinations, :num_blocks] = self.block_tables[sources, :num_blocks]
        self._sampling.copy_slots(sources, destinations)
        self._changes.copy_slots(sources, destinations)
        self._grammars.copy_slots(sources, destinations)
        self.reports.copy_slots(sources, destinations)

    def classify(self) -> None:
        """Finds the slots that compute, that are overrun, and that sample in this step.

        Called by `apply`, and again if a sequence turns out to have ended.
        """
        counters = self.counters
        has_rows = counters.row_count > 0
        self.computing = _indices(has_rows & ~counters.has_ended)
        self.overrun = _indices(has_rows & counters.has_ended)
        num_planned = counters.num_computed_tokens[self.computing] + counters.row_count[self.computing]
        reaching = self.computing[num_planned == counters.num_tokens[self.computing]]
        self.sampling, self.beams = reaching, reaching[:0]
        if self.reports.has_beams:
            is_beam = counters.is_beam[reaching]
            self.sampling, self.beams = reaching[~is_beam], reaching[is_beam]
        self.prompt_spans: PromptSpans | None = self.reports.prompt_spans(self.computing, counters)

    @property
    def is_synchronous(self) -> bool:
        """True if logits are changed in this step, or something besides tokens is reported.

        On a GPU, such a step waits for all steps before it and for its own result.
        """
        return bool(
            self.beams.size
            or self.prompt_spans is not None
            or (self.reports.has_logprobs and self.reports.num_logprobs[self.sampling].any())
            or self._changes.change_any(self.sampling)
        )

    def advance(self) -> None:
        """Counts this step's rows as computed. Beams that have reached their last token wait for a branch."""
        computing = self.computing
        self.counters.num_computed_tokens[computing] += self.counters.row_count[computing]
        if self.beams.size:
            self.counters.row_count[self.beams] = 0

    def fork(self, forks: tuple[Fork, ...]) -> None:
        """Makes children copies of their parents, which have advanced but not sampled, with one row per step each."""
        if not forks:
            return
        parents = np.array([fork.parent_slot for fork in forks], dtype=np.int32)
        children = np.array([fork.child_slot for fork in forks], dtype=np.int32)
        self.counters.copy_slots(parents, children)
        self.counters.row_count[children] = 1
        self._copy_slots(parents, children)
        self._sampling.set_seeds(children, np.array([fork.seed for fork in forks], dtype=np.uint64))

    def draw(self, slots: Ints) -> Draw:
        """Returns how to sample the next token of each slot."""
        changes = self._changes.of(slots)
        if changes is not None:
            changes = replace(changes, masks=self._grammars.masks(slots[changes.rows]))
        return self._sampling.draw(slots, self.counters.num_tokens[slots], changes)

    def begin_masks(self) -> None:
        """Lets other threads compute the masks after the appended tokens. Called before logits are changed again."""
        self._grammars.begin_masks()

    def append(self, slots: Ints, token_ids: Ints, failed: NDArray[np.bool_] | None = None) -> NDArray[np.uint8]:
        """Appends sampled tokens. Returns the end reason of each, EndReason.GOES_ON for most.

        failed  slots whose token has no meaning, because their logits are not finite
        """
        counters = self.counters
        self.token_ids[slots, counters.num_tokens[slots]] = token_ids
        counters.num_tokens[slots] += 1
        reasons = self._sampling.end_reasons(slots, token_ids, counters.num_tokens[slots])
        if self._grammars:
            self._refuse(slots, token_ids, reasons)
        if failed is not None:
            reasons[failed] = EndReason.NOT_FINITE
        has_ended = reasons != 0
        counters.has_ended[slots] = has_ended
        self._changes.count(slots, token_ids)
        self._grammars.drop(slots[has_ended])
        self._grammars.consume(slots, token_ids)
        return reasons

    def repeat_late(self, beams: Ints) -> NDArray[np.bool_]:
        """Returns which beams have no candidates, because their masks were late. They compute their last token again.

        They do so once the scheduler gives them a row again.
        """
        if not self._grammars:
            return np.zeros(len(beams), dtype=np.bool_)
        is_late = self._grammars.take_deferred(beams)
        self.counters.num_computed_tokens[beams[is_late]] -= 1
        return is_late

    def _refuse(self, slots: Ints, token_ids: Ints, reasons: NDArray[np.uint8]) -> None:
        """Sets the end reasons of tokens that grammars do not let their slots append."""
        own = self._grammars.end_reasons(slots, token_ids)
        reasons[own != 0] = own[own != 0]
        for slot in slots[own == EndReason.DEFERRED].tolist():
            self._grammars.keep_deferred(slot, self.token_ids[slot, : self.counters.num_tokens[slot] - 1])


def _indices(mask: NDArray[np.bool_]) -> Ints:
    return np.flatnonzero(mask).astype(np.int32)
