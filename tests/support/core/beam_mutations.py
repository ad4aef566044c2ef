"""Bugs to plant in beam search, and the checks that find them. See `test_mutations`."""

from collections.abc import Callable
from math import inf

import pytest

from scheduler.core import SchedulerState, Sequence, planning
from scheduler.core.active_request import ActiveRequest
from scheduler.core.beams.group import BeamGroup
from scheduler.core.running_batch import RunningBatch
from scheduler.core.step import StepBuilder


def forget_the_copy_when_beams_branch(patch: pytest.MonkeyPatch) -> None:
    plan_beams = planning._plan_beams

    def mutant(state: SchedulerState, builder: StepBuilder) -> None:
        copies = list(builder.plan.block_copies)
        plan_beams(state, builder)
        builder.plan.block_copies[:] = copies

    patch.setattr(planning, "_plan_beams", mutant)


def count_no_blocks_for_branches(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BeamGroup, "num_blocks_to_branch", lambda group, cache: 0)


def plan_beams_ahead(patch: pytest.MonkeyPatch) -> None:
    """Plans with the last decision, before the candidates of the step in flight arrive."""
    plan_beams = planning._plan_beams

    def mutant(state: SchedulerState, builder: StepBuilder) -> None:
        groups = list(state.batch.decided)
        plan_beams(state, builder)
        for group in groups:
            group.branches = [(beam, 0) for beam in group.beams]
            state.batch.decided.append(group)

    patch.setattr(planning, "_plan_beams", mutant)


def keep_the_blocks_of_dropped_beams(patch: pytest.MonkeyPatch) -> None:
    drop_beams = SchedulerState.drop_beams

    def mutant(state: SchedulerState, active: ActiveRequest, dropped: list[Sequence]) -> None:
        for beam in dropped:
            beam.block_table = []
        drop_beams(state, active, dropped)

    patch.setattr(SchedulerState, "drop_beams", mutant)


def give_up_the_slots_of_dropped_beams(patch: pytest.MonkeyPatch) -> None:
    drop_beams = SchedulerState.drop_beams

    def mutant(state: SchedulerState, active: ActiveRequest, dropped: list[Sequence]) -> None:
        drop_beams(state, active, dropped)
        for _ in dropped:
            state.batch.return_slot(active.child_slots.pop())

    patch.setattr(SchedulerState, "drop_beams", mutant)


def free_blocks_of_beams_in_flight(patch: pytest.MonkeyPatch) -> None:
    release = SchedulerState._release_after_flight

    def mutant(state: SchedulerState, block_table: list[int]) -> None:
        in_flight = [beam.block_table for step in state.in_flight for beam in step.beams]
        if any(block_table is table for table in in_flight):
            state.cache.release(block_table)
        else:
            release(state, block_table)

    patch.setattr(SchedulerState, "_release_after_flight", mutant)


def keep_beams_when_preempting(patch: pytest.MonkeyPatch) -> None:
    """Keeps beams and scores: the search continues from its old state, although the prompt is computed again."""
    restart = BeamGroup.restart

    def mutant(group: BeamGroup) -> None:
        search = getattr(group, "search", None)
        restart(group)
        group.search = search or group.search

    patch.setattr(BeamGroup, "restart", mutant)


def promise_a_group_too_little(patch: pytest.MonkeyPatch) -> None:
    worst_case = BeamGroup.num_worst_case_blocks
    patch.setattr(BeamGroup, "num_worst_case_blocks", lambda group, cache: worst_case(group, cache) // 2)


def repeat_late_beams_at_once(patch: pytest.MonkeyPatch) -> None:
    take_resumed = RunningBatch.take_resumed
    patch.setattr(RunningBatch, "take_resumed", lambda batch, now_s: take_resumed(batch, inf))


def count_late_beams_as_computed(patch: pytest.MonkeyPatch) -> None:
    defer_beams = SchedulerState.defer_beams

    def mutant(state: SchedulerState, group: BeamGroup) -> None:
        for beam in group.late:
            beam.num_computed_tokens = beam.num_planned_tokens
            if beam.num_computed_tokens >= beam.publish_at:
                state.cache.publish(beam)
        defer_beams(state, group)

    patch.setattr(SchedulerState, "defer_beams", mutant)


def forget_late_beams(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SchedulerState, "defer_beams", lambda state, group: group.late.clear())


def keep_the_pause_of_groups_that_end(patch: pytest.MonkeyPatch) -> None:
    forget_beams = SchedulerState._forget_beams

    def mutant(state: SchedulerState, group: BeamGroup) -> None:
        paused = list(state.batch.paused)
        forget_beams(state, group)
        state.batch.paused = paused

    patch.setattr(SchedulerState, "_forget_beams", mutant)


MUTATIONS: list[tuple[Callable[[pytest.MonkeyPatch], None], str]] = [
    (forget_the_copy_when_beams_branch, "KV that was never written is read|I11: .* got"),
    (count_no_blocks_for_branches, "no blocks for"),
    (plan_beams_ahead, "I19: a decided group was not planned|I19: .* is in flight"),
    (keep_the_blocks_of_dropped_beams, "I2: block"),
    (give_up_the_slots_of_dropped_beams, "I9: the group"),
    (free_blocks_of_beams_in_flight, "I6: plan"),
    (keep_beams_when_preempting, "I11: .* got"),
    (repeat_late_beams_at_once, "I27: .* before their pauses"),
    (count_late_beams_as_computed, "I3: .* is published|I24: the executor has"),
    (forget_late_beams, "I19: .* is in flight"),
    (keep_the_pause_of_groups_that_end, "I19: the groups of"),
    (promise_a_group_too_little, "no blocks for|I10: .* blocks promised|would fit"),
]
