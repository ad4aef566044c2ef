"""Bugs to plant in closed batches and contiguous allocation, and the checks that find them. See `test_mutations`."""

from collections.abc import Callable

import pytest

from scheduler.core.active_request import ActiveRequest
from scheduler.core.baselines.batching import ClosedBatch
from scheduler.core.baselines.contiguous import ContiguousKVCache, RunPool


def let_any_request_join_a_closed_batch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ClosedBatch, "first", lambda batch: batch._state.waiting.first())


def form_the_next_batch_before_the_last_has_ended(patch: pytest.MonkeyPatch) -> None:
    """Forms it as soon as one member has ended."""
    members = ClosedBatch.members

    def mutant(batch: ClosedBatch) -> list[ActiveRequest]:
        unfinished = members(batch)
        return unfinished if len(unfinished) == len(batch._members) else []

    patch.setattr(ClosedBatch, "members", mutant)


def drop_members_when_they_are_preempted(patch: pytest.MonkeyPatch) -> None:
    """Drops members that lose their executor, too: both return to the queue and then count as other requests."""
    members = ClosedBatch.members

    def mutant(batch: ClosedBatch) -> list[ActiveRequest]:
        unfinished = members(batch)
        return [
            active for active in unfinished if active.sequences[0].num_preemptions + active.sequences[0].num_losses < 1
        ]

    patch.setattr(ClosedBatch, "members", mutant)


def form_a_batch_of_more_than_fit_at_once(patch: pytest.MonkeyPatch) -> None:
    head = ClosedBatch._head

    def mutant(batch: ClosedBatch) -> tuple[list[ActiveRequest], bool]:
        return [batch._state.active(s) for s in batch._state.waiting], head(batch)[1]

    patch.setattr(ClosedBatch, "_head", mutant)


def do_not_wait_for_a_full_batch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ClosedBatch, "_is_due", lambda batch: bool(batch._head()[0]))


def wait_forever_for_a_full_batch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ClosedBatch, "_is_due", lambda batch: batch._head()[1])


def never_ask_to_be_woken_for_a_batch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ClosedBatch, "due_s", None)


def admit_to_a_run_that_is_in_pieces(patch: pytest.MonkeyPatch) -> None:
    """Counts free blocks, and takes them wherever they are."""

    def take_anywhere(pool: RunPool, length: int) -> list[int]:
        return [pool.take() for _ in range(length)]

    patch.setattr(ContiguousKVCache, "has_run_for", lambda cache, sequence: True)
    patch.setattr(RunPool, "take_run", take_anywhere)


def forget_that_a_release_makes_room_for_runs(patch: pytest.MonkeyPatch) -> None:
    release = RunPool.release

    def mutant(pool: RunPool, block: int, *, findable: bool) -> None:
        missing_run = pool._missing_run
        release(pool, block, findable=findable)
        pool._missing_run = missing_run

    patch.setattr(RunPool, "release", mutant)


def reserve_a_token_too_few(patch: pytest.MonkeyPatch) -> None:
    run_length = ContiguousKVCache.run_length
    patch.setattr(ContiguousKVCache, "run_length", lambda cache, request: max(0, run_length(cache, request) - 1))


def share_runs_between_samples(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ContiguousKVCache, "check_fits", lambda cache, request: None)


MUTATIONS: list[tuple[Callable[[pytest.MonkeyPatch], None], str]] = [
    (let_any_request_join_a_closed_batch, "I20: (no batch was formed|.* runs beside the batch)"),
    (form_the_next_batch_before_the_last_has_ended, "I20: .* runs beside the batch"),
    (drop_members_when_they_are_preempted, "I20: "),
    (form_a_batch_of_more_than_fit_at_once, "I20: the batch .* is not the head of the queue"),
    (do_not_wait_for_a_full_batch, "I20: the batch .* was formed too early"),
    (wait_forever_for_a_full_batch, "I20: no batch was formed of .* waited"),
    (never_ask_to_be_woken_for_a_batch, "I12: nothing is in flight"),
    (admit_to_a_run_that_is_in_pieces, "I21: .* which are no run"),
    (forget_that_a_release_makes_room_for_runs, "I12: nothing is in flight"),
    (reserve_a_token_too_few, "I21: a sequence was preempted|I8: |every running sequence has its blocks promised"),
    (share_runs_between_samples, "I3: |I8: |I21: |I12: nothing is in flight|no blocks for|preempted|a run of"),
]
