"""A plan while it is being written (Draft), and while it is in flight (Step)."""

from dataclasses import dataclass, field

from scheduler.core.batch import by_slot
from scheduler.core.kv_cache import Allocation
from scheduler.core.plan import Admission, Fork, StepPlan
from scheduler.core.sequence import Sequence


@dataclass(slots=True)
class Step:
    """A plan in flight: what its result will be committed to."""

    step_id: int
    sampled: list[Sequence]  # by slot
    prefills: list[tuple[Sequence, int]]  # tokens computed, of sequences that lacked more than one
    admitted: list[tuple[Sequence, int]]  # with the tokens found in the prefix cache
    ending: list[Sequence]  # sampled for the last time: they reach max_total_tokens
    beams: list[Sequence]  # by slot: they report candidates
    reporting: list[Sequence]  # of those that sample: their tokens come with log-probabilities
    prompt_reports: list[tuple[Sequence, int, int]]  # by slot: first row, and number of rows that report on the prompt
    releases: list[list[int]] = field(default_factory=list)  # block tables to give back when this is committed


@dataclass(slots=True)
class Draft:
    """Rows and deltas so far. A draft in which nobody got a row has changed nothing and is dropped."""

    budget: int
    decodes: list[Sequence] = field(default_factory=list)
    prefills: dict[Sequence, int] = field(default_factory=dict)
    completed: list[Sequence] = field(default_factory=list)  # whose prefill ends here: they sample, forked ones too
    admitted: list[tuple[Sequence, int]] = field(default_factory=list)
    ending: list[Sequence] = field(default_factory=list)
    branched: list[Sequence] = field(default_factory=list)  # beams, with a row of one token each
    leaders: list[Sequence] = field(default_factory=list)  # whose prefill ends here: their beams begin
    prompt_reports: list[tuple[Sequence, int, int]] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    table_updates: list[int] = field(default_factory=list)
    block_copies: list[int] = field(default_factory=list)
    row_counts: list[int] = field(default_factory=list)
    forks: list[Fork] = field(default_factory=list)
    branches: list[int] = field(default_factory=list)

    @property
    def has_rows(self) -> bool:
        return bool(self.decodes or self.prefills or self.branched)

    def add_decodes(self, sequences: list[Sequence]) -> None:
        """A row of one token for each."""
        self.decodes = sequences.copy()
        self.budget -= len(sequences)
        for sequence in sequences:
            sequence.num_planned_tokens += 1
            if sequence.num_planned_tokens + 1 >= sequence.params.max_total_tokens:
                self.ending.append(sequence)

    def add_branch(self, beam: Sequence, parent: Sequence, token_id: int) -> None:
        """A row of one token, which was not known before."""
        self.branched.append(beam)
        self.branches += (beam.slot, parent.slot, token_id)
        self.budget -= 1
        beam.num_planned_tokens += 1

    def add_prefill(self, sequence: Sequence, num_tokens: int) -> None:
        """So many tokens more."""
        if sequence.params.num_prompt_logprobs:
            first = sequence.num_planned_tokens
            num_rows = min(first + num_tokens, sequence.num_prompt_tokens - 1) - first
            if num_rows > 0:
                self.prompt_reports.append((sequence, first, num_rows))
        self.prefills[sequence] = self.prefills.get(sequence, 0) + num_tokens
        self.budget -= num_tokens
        sequence.num_planned_tokens += num_tokens

    def add_completed(self, sequence: Sequence) -> None:
        self.completed.append(sequence)
        if sequence.num_planned_tokens + 1 >= sequence.params.max_total_tokens:
            self.ending.append(sequence)

    def add_allocation(self, sequence: Sequence, allocation: Allocation) -> None:
        for logical, physical in allocation.table_updates:
            self.table_updates += (sequence.slot, logical, physical)
        if allocation.block_copy:
            self.block_copies += allocation.block_copy

    def set_row_count(self, sequence: Sequence, num_tokens: int) -> None:
        """Tells the executor how many tokens a step this slot computes, if it does not know."""
        if sequence.row_count != num_tokens:
            sequence.row_count = num_tokens
            self.row_counts += (sequence.slot, num_tokens)

    def seal(self, epoch: int, step_id: int, retired_slots: list[int], *, has_reporting: bool) -> tuple[StepPlan, Step]:
        """What goes to the executor, and what is kept until its result is in. has_reporting: some running sequence
        asked for log-probabilities."""
        sampled = self.decodes + self.completed
        if self.completed:
            sampled.sort(key=by_slot)
        plan = StepPlan(
            epoch=epoch,
            step_id=step_id,
            retired_slots=retired_slots,
            admissions=self.admissions,
            table_updates=self.table_updates,
            block_copies=self.block_copies,
            row_counts=self.row_counts,
            forks=self.forks,
            branches=self.branches,
            num_sequences=len(self.decodes) + len(self.branched) + len(self.prefills),
            num_tokens=len(self.decodes) + len(self.branched) + sum(self.prefills.values()),
        )
        step = Step(
            step_id,
            sampled,
            list(self.prefills.items()),
            self.admitted,
            self.ending,
            beams=sorted(self.branched + self.leaders, key=by_slot),
            reporting=[s for s in sampled if s.params.num_logprobs] if has_reporting else [],
            prompt_reports=sorted(self.prompt_reports, key=lambda report: report[0].slot),
        )
        return plan, step
