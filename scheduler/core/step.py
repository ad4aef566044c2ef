"""A step while it is built (StepBuilder) and while its plan is in flight (Step)."""

from dataclasses import dataclass, field

from scheduler.core.kv_cache import Allocation
from scheduler.core.plan import StepPlan
from scheduler.core.running_batch import by_slot
from scheduler.core.sequence import Sequence
from scheduler.core.timing.step_budget import StepBudget


@dataclass(slots=True)
class Step:
    """The sequences of a plan in flight, to which its result is committed.

    sampled         by slot
    prefills        sequences with more than one token to compute, and how many this step computes
    admitted        new sequences, and how many of their tokens were found in the prefix cache
    ending          sequences that sample for the last time, because they reach max_total_tokens
    beams           by slot; they report candidates
    reporting       sequences of `sampled` whose tokens come with log-probabilities
    prompt_reports  by slot: sequence, first row, and number of rows that report on the prompt
    releases        block tables to release when this step is committed
    withdraws       the plan tells the executor to forget digests
    """

    step_id: int
    sampled: list[Sequence] = field(default_factory=list)
    prefills: dict[Sequence, int] = field(default_factory=dict)
    admitted: list[tuple[Sequence, int]] = field(default_factory=list)
    ending: list[Sequence] = field(default_factory=list)
    beams: list[Sequence] = field(default_factory=list)
    reporting: list[Sequence] = field(default_factory=list)
    prompt_reports: list[tuple[Sequence, int, int]] = field(default_factory=list)
    releases: list[list[int]] = field(default_factory=list)
    withdraws: bool = False


class StepBuilder:
    """Fills a plan for the executor and, beside it, the step that its result will be committed to.

    `budget` says how many tokens may still be added. `awaited` has the blocks for which waiting sequences were set
    aside: their place in the prompt, and their digest. A builder without rows has changed nothing, and is dropped.
    """

    __slots__ = ("awaited", "budget", "plan", "step")

    def __init__(self, epoch: int, step_id: int, budget: StepBudget) -> None:
        self.budget = budget
        self.awaited: list[tuple[int, bytes]] = []
        self.plan = StepPlan(epoch, step_id)
        self.step = Step(step_id)

    def add_decodes(self, sequences: list[Sequence]) -> None:
        """Adds a row of one token for each sequence."""
        self.step.sampled = sequences.copy()
        self._add_rows(len(sequences), len(sequences))
        self.budget.take_decodes(sequences)
        for sequence in sequences:
            num_planned = sequence.num_planned_tokens = sequence.num_planned_tokens + 1
            if num_planned + 1 >= sequence.params.max_total_tokens:
                self.step.ending.append(sequence)

    def add_branch(self, beam: Sequence, parent: Sequence, token_id: int) -> None:
        """Adds a row of one token, which the executor does not know yet."""
        self.plan.branches += (beam.slot, parent.slot, token_id)
        self.add_beam(beam)
        beam.num_planned_tokens += 1

    def add_beam(self, beam: Sequence) -> None:
        """Adds a row of one token, which is new or was computed before."""
        self.step.beams.append(beam)
        self._add_rows(1, 1)
        self.budget.take_decodes((beam,))

    def add_prefill(self, sequence: Sequence, num_tokens: int) -> None:
        """Adds `num_tokens` tokens to the row of a sequence."""
        if sequence.params.num_prompt_logprobs:
            first = sequence.num_planned_tokens
            num_rows = min(first + num_tokens, sequence.num_prompt_tokens - 1) - first
            if num_rows > 0:
                self.step.prompt_reports.append((sequence, first, num_rows))
        prefills = self.step.prefills
        self._add_rows(sequence not in prefills, num_tokens)
        self.budget.take_prompt(sequence, num_tokens)
        prefills[sequence] = prefills.get(sequence, 0) + num_tokens
        sequence.num_planned_tokens += num_tokens

    def add_sample(self, sequence: Sequence) -> None:
        """Makes a sequence sample whose prefill ends in this step, or that was forked from such a sequence."""
        self.step.sampled.append(sequence)
        if sequence.num_planned_tokens + 1 >= sequence.params.max_total_tokens:
            self.step.ending.append(sequence)

    def add_allocation(self, sequence: Sequence, allocation: Allocation) -> None:
        for logical, physical in allocation.table_updates:
            self.plan.table_updates += (sequence.slot, logical, physical)
        if allocation.block_copy:
            self.plan.block_copies += allocation.block_copy

    def set_row_count(self, sequence: Sequence, num_tokens: int) -> None:
        """Tells the executor how many tokens a step this slot computes, if that has changed."""
        if sequence.row_count != num_tokens:
            sequence.row_count = num_tokens
            self.plan.row_counts += (sequence.slot, num_tokens)

    def build(self, retired_slots: list[int], *, has_reporting: bool) -> tuple[StepPlan, Step]:
        """Returns the plan for the executor, and the step to keep until its result arrives.

        `has_reporting` says whether some running sequence asked for log-probabilities.
        """
        plan, step = self.plan, self.step
        plan.retired_slots = retired_slots
        if step.prefills:
            step.sampled.sort(key=by_slot)
            step.prompt_reports.sort(key=lambda report: report[0].slot)
        step.beams.sort(key=by_slot)
        if has_reporting:
            step.reporting = [sequence for sequence in step.sampled if sequence.params.num_logprobs]
        return plan, step

    def _add_rows(self, num_sequences: int, num_tokens: int) -> None:
        self.plan.num_sequences += num_sequences
        self.plan.num_tokens += num_tokens
