"""Who computed how many tokens in which step, slot by slot: the batch timeline.

A plan says only what changed since the last one, and so does this log. Whoever knows the rows before a step, and what
the step changed, knows what each slot computed in it; a step of an unchanged batch costs two numbers.
"""

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from scheduler.core import Scheduler, Sequence, StepPlan

MAX_STEPS = 512
"""Steps kept until they are taken; of more, the oldest are lost."""

Rows = dict[int, tuple[str, int]]
"""By slot: the sequence, and the tokens that it computes in each step."""


class LoggedStep(NamedTuple):
    """What a step changed, in the order in which it applies. Flat lists, as in a plan.

    retired     slots that are empty now
    entered     (slot, sequence): admitted
    row_counts  (slot, tokens a step)
    forked      (slot, sequence): computes one token a step, from the *next* step on

    Step 1 is an epoch's first: every slot was empty before it.
    """

    step_id: int
    num_tokens: int
    retired: SequenceOf[int] = ()
    entered: SequenceOf[tuple[int, str]] = ()
    row_counts: SequenceOf[int] = ()
    forked: SequenceOf[tuple[int, str]] = ()

    @property
    def changes_rows(self) -> bool:
        return bool(self.retired or self.entered or self.row_counts or self.forked or self.step_id == 1)

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
            self.rows = {s.slot: (sequence_key(s), s.row_count) for s in core.running_sequences() if s.slot >= 0}

    def unwatch(self) -> None:
        self._core = None
        self._steps.clear()
        self._has_lost_steps = False
        self.rows = {}

    def planned(self, plan: StepPlan) -> None:
        if self._core is None:
            return
        if plan.retired_slots or plan.admissions or plan.row_counts or plan.forks:
            self._steps.append(_changing_step(plan, self._core))
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


def _changing_step(plan: StepPlan, core: Scheduler) -> LoggedStep:
    return LoggedStep(
        step_id=plan.step_id,
        num_tokens=plan.num_tokens,
        retired=plan.retired_slots,
        entered=_entered(plan, core.running_sequences()) if plan.admissions else (),
        row_counts=plan.row_counts,
        forked=_forked(plan, core.running_sequences()) if plan.forks else (),
    )


def _entered(plan: StepPlan, running: Iterable[Sequence]) -> list[tuple[int, str]]:
    """A plan names no sequence, and one that computes its only row in it has no slot any more: its parameters tell."""
    keys = {id(sequence.params): sequence_key(sequence) for sequence in running}
    return [(entry.slot, keys[id(entry.params)]) for entry in plan.admissions if id(entry.params) in keys]


def _forked(plan: StepPlan, running: Iterable[Sequence]) -> list[tuple[int, str]]:
    """One that has ended already, with the token of the fork itself, never gets a row."""
    keys = {sequence.slot: sequence_key(sequence) for sequence in running}
    return [(fork.child_slot, keys[fork.child_slot]) for fork in plan.forks if fork.child_slot in keys]
