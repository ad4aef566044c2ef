"""The simulation is worth what it finds: each of these mistakes, made on purpose in the core, is found, and named.

A mutation replaces one method of the product. The same worlds that end well without it must not end well with it.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest

from scheduler.core import Events, FinishReason, QuireError, Sequence, StepResult
from scheduler.core.active_request import ActiveRequest
from scheduler.core.beam_group import BeamGroup
from scheduler.core.block_pool import BlockPool
from scheduler.core.books import Books
from scheduler.core.cohort import Cohort
from scheduler.core.committer import Committer
from scheduler.core.draft import Draft, Step
from scheduler.core.kv_cache import Allocation, KVCache
from scheduler.core.planner import Planner
from scheduler.core.waiting_queue import WaitingQueue
from tests.core.fake_executor import PlanError
from tests.core.simulation import simulate

NUM_SEEDS = 500


def skip_one_ref_count_decrement(patch: pytest.MonkeyPatch) -> None:
    release, calls = BlockPool.release, iter(range(10**9))

    def mutant(pool: BlockPool, block: int, *, findable: bool) -> None:
        if next(calls) != 20:
            release(pool, block, findable=findable)

    patch.setattr(BlockPool, "release", mutant)


def publish_blocks_when_they_are_planned(patch: pytest.MonkeyPatch) -> None:
    plan_chunk = Planner._plan_chunk

    def mutant(planner: Planner, draft: Draft, sequence: Sequence, num_tokens: int) -> None:
        plan_chunk(planner, draft, sequence, num_tokens)
        num_computed = sequence.num_computed_tokens
        sequence.num_computed_tokens = sequence.num_planned_tokens
        if sequence.num_computed_tokens >= sequence.publish_at:
            planner._books.cache.publish(sequence)
        sequence.num_computed_tokens = num_computed

    patch.setattr(Planner, "_plan_chunk", mutant)


def free_blocks_while_a_plan_in_flight_uses_them(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Books, "_release_after_flight", lambda books, table: books.cache.release(table))


def forget_the_copy_of_a_shared_block(patch: pytest.MonkeyPatch) -> None:
    try_allocate = KVCache.try_allocate

    def mutant(cache: KVCache, sequence: Sequence, num_tokens: int) -> Allocation | None:
        allocation = try_allocate(cache, sequence, num_tokens)
        return allocation and replace(allocation, block_copy=None)

    patch.setattr(KVCache, "try_allocate", mutant)


def write_to_a_shared_block_in_place(patch: pytest.MonkeyPatch) -> None:
    fork = KVCache.fork

    def mutant(cache: KVCache, parent: Sequence, child: Sequence) -> None:
        fork(cache, parent, child)
        child.write_limit = len(child.block_table) * cache.block_size

    patch.setattr(KVCache, "fork", mutant)


def drop_one_queued_request(patch: pytest.MonkeyPatch) -> None:
    add, calls = WaitingQueue.add, iter(range(10**9))

    def mutant(queue: WaitingQueue, sequence: Sequence) -> None:
        if next(calls) != 20:
            add(queue, sequence)

    patch.setattr(WaitingQueue, "add", mutant)


def publish_under_another_salt(patch: pytest.MonkeyPatch) -> None:
    publish = KVCache.publish

    def mutant(cache: KVCache, sequence: Sequence) -> None:
        request, digests = sequence.request, sequence.digests
        sequence.request, sequence.digests = replace(request, cache_salt=b"of all"), []
        publish(cache, sequence)
        sequence.request, sequence.digests = request, digests

    patch.setattr(KVCache, "publish", mutant)


def send_tokens_again_after_a_recompute(patch: pytest.MonkeyPatch) -> None:
    append_tokens = Committer._append_tokens

    def mutant(committer: Committer, step: Step, result: StepResult, events: Events) -> None:
        for sequence, _ in step.admitted:
            for token_id in sequence.token_ids[sequence.num_prompt_tokens :]:
                events.sequences.append(sequence)
                events.token_ids.append(token_id)
        append_tokens(committer, step, result, events)

    patch.setattr(Committer, "_append_tokens", mutant)


def count_the_token_of_an_overrun(patch: pytest.MonkeyPatch) -> None:
    append_tokens = Committer._append_tokens

    def mutant(committer: Committer, step: Step, result: StepResult, events: Events) -> None:
        for sequence, token_id in zip(step.sampled, result.token_ids, strict=True):
            if sequence.is_finished:
                events.sequences.append(sequence)
                events.token_ids.append(token_id)
        append_tokens(committer, step, result, events)

    patch.setattr(Committer, "_append_tokens", mutant)


def forget_generated_tokens_when_preempting(patch: pytest.MonkeyPatch) -> None:
    preempt = Books.preempt

    def mutant(books: Books, sequence: Sequence) -> None:
        preempt(books, sequence)
        del sequence.token_ids[sequence.num_prompt_tokens :]

    patch.setattr(Books, "preempt", mutant)


def let_the_short_ones_overtake(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WaitingQueue, "first", lambda queue: min(queue, key=lambda s: s.num_tokens, default=None))


def preempt_without_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Planner, "_needs_guarantee", lambda planner, sequence: False)


def give_away_promised_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVCache, "num_available_blocks", lambda cache, sequence=None: cache.pool.num_free_blocks)


def take_results_of_lost_executors(patch: pytest.MonkeyPatch) -> None:
    check_result = Committer._check_result

    def mutant(committer: Committer, result: StepResult) -> Step:
        if committer._books.in_flight:
            result = replace(result, epoch=committer._books.epoch, step_id=committer._books.in_flight[0].step_id)
        return check_result(committer, result)

    patch.setattr(Committer, "_check_result", mutant)


def end_a_sequence_one_token_early(patch: pytest.MonkeyPatch) -> None:
    end_sequences = Committer._end_sequences

    def mutant(committer: Committer, step: Step, result: StepResult, events: Events) -> None:
        for sequence in step.sampled:
            if not sequence.is_finished and sequence.num_tokens == sequence.params.max_total_tokens - 1:
                committer._books.finish(sequence, FinishReason.LENGTH)
                events.finished.append((sequence, FinishReason.LENGTH))
        end_sequences(committer, step, result, events)

    patch.setattr(Committer, "_end_sequences", mutant)


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


def report_on_the_prompt_again_after_a_preemption(patch: pytest.MonkeyPatch) -> None:
    forget_kv = Sequence.forget_kv

    def mutant(sequence: Sequence) -> None:
        sequence.num_prompt_reported = 0
        forget_kv(sequence)

    patch.setattr(Sequence, "forget_kv", mutant)


def read_prefixes_that_are_to_be_reported_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVCache, "reads_prefixes", lambda cache, sequence: cache._enable_prefix_caching)


def wait_for_prefixes_that_nobody_computes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Planner, "_awaits_prefix", lambda planner, draft, sequence, prefix: len(prefix) < len(sequence.digests)
    )


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
    (skip_one_ref_count_decrement, "I2: block"),
    (publish_blocks_when_they_are_planned, "I5: block .* is published, its KV is not computed"),
    (free_blocks_while_a_plan_in_flight_uses_them, "I6: plan"),
    (forget_the_copy_of_a_shared_block, "KV that was never written is read|I11: .* got"),
    (write_to_a_shared_block_in_place, "I3: .* may write to block"),
    (drop_one_queued_request, "I7: waiting and running"),
    (publish_under_another_salt, "I5: block .* is published for other tokens"),
    (send_tokens_again_after_a_recompute, "I11: .* got"),
    (count_the_token_of_an_overrun, "I11: a token of .* (after its end|before its request started)"),
    (forget_generated_tokens_when_preempting, "I11: .* got"),
    (let_the_short_ones_overtake, "I13: .* overtook"),
    (preempt_without_end, "I14: .* was preempted"),
    (give_away_promised_blocks, "I10: .* blocks promised|every running sequence has its blocks promised"),
    (take_results_of_lost_executors, "I17: a result"),
    (end_a_sequence_one_token_early, "I11: .* ended by"),
    (forget_the_copy_when_beams_branch, "KV that was never written is read|I11: .* got"),
    (count_no_blocks_for_branches, "no blocks for"),
    (plan_beams_ahead, "I19: a decided group was not planned|I19: .* is in flight"),
    (keep_the_blocks_of_dropped_beams, "I2: block"),
    (give_up_the_slots_of_dropped_beams, "I9: the group"),
    (free_blocks_of_beams_in_flight, "I6: plan"),
    (keep_beams_when_preempting, "I11: .* got"),
    (promise_a_group_too_little, "no blocks for|I10: .* blocks promised|would fit"),
    (report_on_the_prompt_again_after_a_preemption, "I18: .* is told of prompt token"),
    (read_prefixes_that_are_to_be_reported_on, "I18: wrong log-probabilities"),
    (wait_for_prefixes_that_nobody_computes, "I12: .* never ended|I12: nothing is in flight"),
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
    (share_runs_between_samples, "I3: |I8: |I21: |no blocks for|preempted|a run of"),
]


def simulate_worlds() -> None:
    for seed in range(NUM_SEEDS):
        simulate(seed)


def test_without_a_mutation_every_world_ends_well() -> None:
    simulate_worlds()


@pytest.mark.parametrize(("mutate", "finding"), MUTATIONS, ids=[mutate.__name__ for mutate, _ in MUTATIONS])
def test_a_mutation_is_found(
    monkeypatch: pytest.MonkeyPatch, mutate: Callable[[pytest.MonkeyPatch], None], finding: str
) -> None:
    mutate(monkeypatch)
    with pytest.raises((QuireError, PlanError, AssertionError), match=finding):
        simulate_worlds()
