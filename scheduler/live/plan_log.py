"""Who computed how many tokens in which step, slot by slot: the batch timeline.

A plan says only what changed since the last one, and so does this log. Whoever knows the rows before a step, and what
the step changed, knows what each slot computed in it; a step of an unchanged batch costs two numbers.
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
"""Steps kept until they are taken; of more, the oldest are lost."""

Rows = dict[int, tuple[str, int]]
"""By slot: the sequence, and the tokens that it computes in each step."""


class LoggedStep(NamedTuple):
    """What a step changed, in the order in which it applies. Flat lists, as in a plan.

    retired     slots that are empty now
    entered     (slot, sequence): admitted, or a beam that goes on there
    row_counts  (slot, tokens a step)
    forked      (slot, sequence): computes one token a step, from the *next* step on
    paused      slots of beams: they compute in this step, and from the next one on nothing, until they are decided

    Step 1 is an epoch's first: every slot was empty before it.
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
        """Makes the rows before this step those before the next."""
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
    """Told of each plan. Does nothing with it unless somebody watches."""

    def __init__(self) -> None:
        self._core: Scheduler | None = None
        self._steps: deque[LoggedStep] = deque()
        self._has_lost_steps = False
        self.rows: Rows = {}
        """Before the oldest step that has not been taken."""

    def watch(self, core: Scheduler) -> None:
        """From now on. Again is no error."""
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
        """The newest plan of a core, which still has it in flight."""
        if self._core is None:
            return
        if self._core is not core:  # the engine has begun anew, and the old one knows nothing of this plan
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
        """The steps since the last call; and, if there are gaps between the two, the rows before the first of them."""
        rows = dict(self.rows) if self._has_lost_steps else None
        steps = list(self._steps)
        self._steps.clear()
        self._has_lost_steps = False
        for step in steps:
            if step.changes_rows:
                step.apply(self.rows)
        return rows, steps


def sequence_key(sequence: Sequence) -> str:
    """As the page knows a sequence: engine's request id and index."""
    return f"{sequence.request.request_id}.{sequence.index}"


def _next_row_count(sequence: Sequence) -> int:
    """Beams pause: they get a row with each branch. So does their leader, once it has computed the prompt."""
    return 0 if sequence.is_beam and not sequence.num_uncomputed_tokens else sequence.row_count


def _changing_step(plan: StepPlan, step: Step, running: Iterable[Sequence]) -> LoggedStep:
    """A plan knows slots, the core's record of it the sequences."""
    branched = set(plan.branches[::3])
    beams = [(beam.slot, sequence_key(beam)) for beam in step.beams if beam.slot in branched]
    # One that computes its only row in this plan has no slot any more.
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
    """One that has ended already, with the token of the fork itself, never gets a row."""
    keys = {sequence.slot: sequence_key(sequence) for sequence in running}
    return [(fork.child_slot, keys[fork.child_slot]) for fork in plan.forks if fork.child_slot in keys]
