"""Mistakes in beam search, and what finds them. See `test_mutations`."""

from collections.abc import Callable

import pytest

from scheduler.core import Sequence
from scheduler.core.active_request import ActiveRequest
from scheduler.core.beam_group import BeamGroup
from scheduler.core.books import Books
from scheduler.core.draft import Draft
from scheduler.core.planner import Planner


def forget_the_copy_when_beams_branch(patch: pytest.MonkeyPatch) -> None:
    plan_beams = Planner._plan_beams

    def mutant(planner: Planner, draft: Draft) -> None:
        copies = list(draft.block_copies)
        plan_beams(planner, draft)
        draft.block_copies[:] = copies

    patch.setattr(Planner, "_plan_beams", mutant)


def count_no_blocks_for_branches(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BeamGroup, "num_blocks_to_branch", lambda group, cache: 0)


def plan_beams_ahead(patch: pytest.MonkeyPatch) -> None:
    """With what was decided last, before the candidates of the step in flight are in."""
    plan_beams = Planner._plan_beams

    def mutant(planner: Planner, draft: Draft) -> None:
        groups = list(planner._books.batch.decided)
        plan_beams(planner, draft)
        for group in groups:
            group.branches = [(beam, 0) for beam in group.beams]
            planner._books.batch.decided.append(group)

    patch.setattr(Planner, "_plan_beams", mutant)


def keep_the_blocks_of_dropped_beams(patch: pytest.MonkeyPatch) -> None:
    drop_beams = Books.drop_beams

    def mutant(books: Books, active: ActiveRequest, dropped: list[Sequence]) -> None:
        for beam in dropped:
            beam.block_table = []
        drop_beams(books, active, dropped)

    patch.setattr(Books, "drop_beams", mutant)


def give_up_the_slots_of_dropped_beams(patch: pytest.MonkeyPatch) -> None:
    drop_beams = Books.drop_beams

    def mutant(books: Books, active: ActiveRequest, dropped: list[Sequence]) -> None:
        drop_beams(books, active, dropped)
        for _ in dropped:
            books.batch.return_slot(active.child_slots.pop())

    patch.setattr(Books, "drop_beams", mutant)


def free_blocks_of_beams_in_flight(patch: pytest.MonkeyPatch) -> None:
    release = Books._release_after_flight

    def mutant(books: Books, block_table: list[int]) -> None:
        in_flight = [beam.block_table for step in books.in_flight for beam in step.beams]
        if any(block_table is table for table in in_flight):
            books.cache.release(block_table)
        else:
            release(books, block_table)

    patch.setattr(Books, "_release_after_flight", mutant)


def keep_beams_when_preempting(patch: pytest.MonkeyPatch) -> None:
    """Their scores, that is: the search goes on where it was, from the prompt."""
    restart = BeamGroup.restart

    def mutant(group: BeamGroup) -> None:
        search = getattr(group, "search", None)
        restart(group)
        group.search = search or group.search

    patch.setattr(BeamGroup, "restart", mutant)


def promise_a_group_too_little(patch: pytest.MonkeyPatch) -> None:
    worst_case = BeamGroup.num_worst_case_blocks
    patch.setattr(BeamGroup, "num_worst_case_blocks", lambda group, cache: worst_case(group, cache) // 2)


MUTATIONS: list[tuple[Callable[[pytest.MonkeyPatch], None], str]] = [
    (forget_the_copy_when_beams_branch, "KV that was never written is read|I11: .* got"),
    (count_no_blocks_for_branches, "no blocks for"),
    (plan_beams_ahead, "I19: a decided group was not planned|I19: .* is in flight"),
    (keep_the_blocks_of_dropped_beams, "I2: block"),
    (give_up_the_slots_of_dropped_beams, "I9: the group"),
    (free_blocks_of_beams_in_flight, "I6: plan"),
    (keep_beams_when_preempting, "I11: .* got"),
    (promise_a_group_too_little, "no blocks for|I10: .* blocks promised|would fit"),
]
