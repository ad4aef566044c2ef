"""Mistakes in closed batches and contiguous memory, and what finds them. See `test_mutations`."""

from collections.abc import Callable

import pytest

from scheduler.core.active_request import ActiveRequest
from scheduler.core.block_pool import BlockPool
from scheduler.core.cohort import Cohort
from scheduler.core.kv_cache import KVCache


def let_anybody_join_a_closed_batch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Cohort, "next_up", lambda cohort: cohort._waiting.first())


def form_the_next_batch_before_the_last_has_ended(patch: pytest.MonkeyPatch) -> None:
    """As soon as one of its members has."""
    members = Cohort.members

    def mutant(cohort: Cohort) -> list[ActiveRequest]:
        unfinished = members(cohort)
        return unfinished if len(unfinished) == len(cohort._members) else []

    patch.setattr(Cohort, "members", mutant)


def drop_members_when_they_are_preempted(patch: pytest.MonkeyPatch) -> None:
    """Or lose their executor: they wait then, and are taken for others."""
    members = Cohort.members

    def mutant(cohort: Cohort) -> list[ActiveRequest]:
        unfinished = members(cohort)
        return [
            active for active in unfinished if active.sequences[0].num_preemptions + active.sequences[0].num_losses < 1
        ]

    patch.setattr(Cohort, "members", mutant)


def form_a_batch_of_more_than_fit_at_once(patch: pytest.MonkeyPatch) -> None:
    head = Cohort._head

    def mutant(cohort: Cohort) -> tuple[list[ActiveRequest], bool]:
        return [cohort._unfinished[s.request.request_id] for s in cohort._waiting], head(cohort)[1]

    patch.setattr(Cohort, "_head", mutant)


def do_not_wait_for_a_full_batch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Cohort, "_is_due", lambda cohort: bool(cohort._head()[0]))


def wait_for_a_full_batch_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Cohort, "_is_due", lambda cohort: cohort._head()[1])


def never_ask_to_be_woken_for_a_batch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Cohort, "due_s", None)


def admit_to_a_run_that_is_in_pieces(patch: pytest.MonkeyPatch) -> None:
    """It counts free blocks, and takes them where they are."""

    def take_anywhere(pool: BlockPool, length: int) -> list[int]:
        return [pool.take() for _ in range(length)]

    patch.setattr(KVCache, "has_run_for", lambda cache, sequence: True)
    patch.setattr(BlockPool, "take_run", take_anywhere)


def forget_that_a_release_makes_room_for_runs(patch: pytest.MonkeyPatch) -> None:
    release = BlockPool.release

    def mutant(pool: BlockPool, block: int, *, findable: bool) -> None:
        missing_run = pool._missing_run
        release(pool, block, findable=findable)
        pool._missing_run = missing_run

    patch.setattr(BlockPool, "release", mutant)


def reserve_a_token_too_few(patch: pytest.MonkeyPatch) -> None:
    run_length = KVCache.run_length
    patch.setattr(KVCache, "run_length", lambda cache, request: max(0, run_length(cache, request) - 1))


def share_runs_between_samples(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("scheduler.core.capacity._check_fits_run", lambda request, cache: None)


MUTATIONS: list[tuple[Callable[[pytest.MonkeyPatch], None], str]] = [
    (let_anybody_join_a_closed_batch, "I20: (no batch was formed|.* runs beside the batch)"),
    (form_the_next_batch_before_the_last_has_ended, "I20: .* runs beside the batch"),
    (drop_members_when_they_are_preempted, "I20: "),
    (form_a_batch_of_more_than_fit_at_once, "I20: the batch .* is not the head of the queue"),
    (do_not_wait_for_a_full_batch, "I20: the batch .* was formed too early"),
    (wait_for_a_full_batch_for_ever, "I20: no batch was formed of .* waited"),
    (never_ask_to_be_woken_for_a_batch, "I12: nothing is in flight"),
    (admit_to_a_run_that_is_in_pieces, "I21: .* which are no run"),
    (forget_that_a_release_makes_room_for_runs, "I12: nothing is in flight"),
    (reserve_a_token_too_few, "I21: somebody was preempted|I8: "),
    (share_runs_between_samples, "I3: |I8: |I21: |I12: nothing is in flight|no blocks for|preempted|a run of"),
]
