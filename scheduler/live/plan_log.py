"""Logs how many tokens each slot computes in each step: the batch timeline.

A plan holds only the changes since the last one, and so does this log. The rows before a step and the changes of the
step determine what each slot computed in it; a step of an unchanged batch takes two numbers.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as SequenceOf

    from scheduler.core import Scheduler, Sequence, StepPlan
    from scheduler.core.step import Step

MAX_STEPS = 512
"""Steps kept until they are taken; if there are more, the oldest are dropped."""

Rows = dict[int, tuple[str, int]]
"""Maps a slot to its sequence and to the number of tokens that the sequence computes in each step."""


class LoggedStep(NamedTuple):
    """The changes of a step, in the order in which they apply.

    retired     slots that are empty now
    entered     (slot, sequence): admitted, or a beam that continues there
    row_counts  flat list of slot, tokens per step
    forked      (slot, sequence): computes one token per step, from the *next* step on
    paused      slots of beams: they compute in this step, and nothing from the next one on until they are decided

    Step 1 is the first of an epoch: every slot was empty before it.
    """

    step_id: int
    num_tokens: int
    retired: SequenceOf[int] = ()
    entered: SequenceOf[tuple[int, str]] = ()
    row_counts: SequenceOf[int] = ()
    forked: SequenceOf[tuple[int, str]] = ()
    paused: SequenceOf[int] = ()

    @property
    def changes_rows(self) -> bool:
        return self.step_id == 1 or any((self.retired, self.entered, self.row_counts, self.forked, self.paused))

    def apply(self, rows: Rows) -> None:
        """Changes the rows before this step into those before the next one."""
        if self.step_id == 1:
            rows.clear()
        for slot in self.retired:
            rows.pop(slot, None)
        for slot, sequence in self.entered:
            rows[slot] = (sequence, 0)
        for slot, num_tokens in zip(self.row_counts[::2], self.row_counts[1::2], strict=True):
            if slot in rows:
                rows[slot] = (rows[slot][0], num_tokens)
        for slot, sequence in self.forked:
            rows[slot] = (sequence, 1)
        for slot in self.paused:
            rows[slot] = (rows[slot][0], 0)


class PlanLog:
    """Logs each plan while it is watched; otherwise does nothing."""

    def __init__(self) -> None:
        self._core: Scheduler | None = None
        self._steps: deque[LoggedStep] = deque()
        self._has_lost_steps = False
        self.rows: Rows = {}
        """The rows before the oldest step that has not been taken."""

    def watch(self, core: Scheduler) -> None:
        """Logs the plans of a core from now on. Calling it again has no effect."""
        if self._core is not core:
            self.unwatch()
            self._core = core
            self.rows = {s.slot: (sequence_key(s), _next_row_count(s)) for s in core.state.batch.running if s.slot >= 0}

    def unwatch(self) -> None:
        self._core = None
        self._steps.clear()
        self._has_lost_steps = False
        self.rows = {}

    def planned(self, core: Scheduler, plan: StepPlan) -> None:
        """Logs the newest plan of a core, which still has it in flight."""
        if self._core is None:
            return
        if self._core is not core:  # the engine has replaced the core, and the old one does not know this plan
            self.watch(core)
            self._has_lost_steps = True
            return
        step = core.state.in_flight[-1]
        if plan.retired_slots or plan.admissions or plan.row_counts or plan.forks or step.beams:
            self._steps.append(_changing_step(plan, step, core.state.batch.running))
        else:
            self._steps.append(LoggedStep(plan.step_id, plan.num_tokens))
        if len(self._steps) > MAX_STEPS:
            self._steps.popleft().apply(self.rows)
            self._has_lost_steps = True

    def take(self) -> tuple[Rows | None, list[LoggedStep]]:
        """Returns the steps since the last call. If older ones were dropped, also the rows before the first of them."""
        rows = dict(self.rows) if self._has_lost_steps else None
        steps = list(self._steps)
        self._steps.clear()
        self._has_lost_steps = False
        for step in steps:
            if step.changes_rows:
                step.apply(self.rows)
        return rows, steps


def sequence_key(sequence: Sequence) -> str:
    """Returns the page's key of a sequence: the engine's request id and the index."""
    return f"{sequence.request.request_id}.{sequence.index}"


def _next_row_count(sequence: Sequence) -> int:
    """Returns the tokens in the next step. A beam has none until it branches, nor has its leader after the prompt."""
    return 0 if sequence.is_beam and not sequence.num_uncomputed_tokens else sequence.row_count


def _changing_step(plan: StepPlan, step: Step, running: Iterable[Sequence]) -> LoggedStep:
    """Joins a plan, which has the slots, with the core's record of the step, which has the sequences."""
    branched = set(plan.branches[::3])
    beams = [(beam.slot, sequence_key(beam)) for beam in step.beams if beam.slot in branched]
    # The slot comes from the plan: a sequence that computes its only row in this step has none any more.
    admitted = zip(plan.admissions, step.admitted, strict=True)
    return LoggedStep(
        step_id=plan.step_id,
        num_tokens=plan.num_tokens,
        retired=plan.retired_slots,
        entered=[(admission.slot, sequence_key(sequence)) for admission, (sequence, _) in admitted] + beams,
        row_counts=plan.row_counts + [number for slot, _ in beams for number in (slot, 1)],
        forked=_forked(plan, running) if plan.forks else (),
        paused=[beam.slot for beam in step.beams],
    )


def _forked(plan: StepPlan, running: Iterable[Sequence]) -> list[tuple[int, str]]:
    """Returns the forks that get a row; a sequence that ended with the token of the fork itself does not."""
    keys = {sequence.slot: sequence_key(sequence) for sequence in running}
    return [(fork.child_slot, keys[fork.child_slot]) for fork in plan.forks if fork.child_slot in keys]
