"""Checks that the simulation finds and names bugs, which are planted in the core on purpose.

A mutation replaces one function or method of the core. Simulations that pass without it must fail with it.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from math import inf

import pytest

from scheduler.core import (
    Events,
    FinishReason,
    QuireError,
    SchedulerState,
    Sequence,
    StepResult,
    admission,
    commit,
    planning,
)
from scheduler.core.block_pool import BlockPool
from scheduler.core.fairness.fair_queue import FairQueue
from scheduler.core.kv_cache import Allocation, KVCache
from scheduler.core.step import Step, StepBuilder
from scheduler.core.tenants.account import Account
from scheduler.core.timing import step_budget
from scheduler.core.timing.step_budget import StepBudget
from scheduler.core.waiting_queue import WaitingQueue
from tests.support.core import beam_mutations, mode_mutations
from tests.support.core.fake_executor import PlanError
from tests.support.core.simulation import simulate

pytestmark = pytest.mark.exhaustive

NUM_SEEDS = 500


def skip_one_ref_count_decrement(patch: pytest.MonkeyPatch) -> None:
    release, calls = BlockPool.release, iter(range(10**9))

    def mutant(pool: BlockPool, block: int, *, findable: bool) -> None:
        if next(calls) != 20:
            release(pool, block, findable=findable)

    patch.setattr(BlockPool, "release", mutant)


def publish_blocks_when_they_are_planned(patch: pytest.MonkeyPatch) -> None:
    plan_chunk = planning._plan_chunk

    def mutant(state: SchedulerState, builder: StepBuilder, sequence: Sequence, num_tokens: int) -> None:
        plan_chunk(state, builder, sequence, num_tokens)
        num_computed = sequence.num_computed_tokens
        sequence.num_computed_tokens = sequence.num_planned_tokens
        if sequence.num_computed_tokens >= sequence.publish_at:
            state.cache.publish(sequence)
        sequence.num_computed_tokens = num_computed

    patch.setattr(planning, "_plan_chunk", mutant)


def free_blocks_while_a_plan_in_flight_uses_them(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SchedulerState, "_release_after_flight", lambda state, table: state.cache.release(table))


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
    append_tokens = commit._append_tokens

    def mutant(state: SchedulerState, step: Step, result: StepResult, events: Events) -> None:
        for sequence, _ in step.admitted:
            for token_id in sequence.token_ids[sequence.num_prompt_tokens :]:
                events.sequences.append(sequence)
                events.token_ids.append(token_id)
        append_tokens(state, step, result, events)

    patch.setattr(commit, "_append_tokens", mutant)


def count_the_token_of_an_overrun(patch: pytest.MonkeyPatch) -> None:
    append_tokens = commit._append_tokens

    def mutant(state: SchedulerState, step: Step, result: StepResult, events: Events) -> None:
        for sequence, token_id in zip(step.sampled, result.token_ids, strict=True):
            if sequence.is_finished:
                events.sequences.append(sequence)
                events.token_ids.append(token_id)
        append_tokens(state, step, result, events)

    patch.setattr(commit, "_append_tokens", mutant)


def forget_generated_tokens_when_preempting(patch: pytest.MonkeyPatch) -> None:
    preempt = SchedulerState.preempt

    def mutant(state: SchedulerState, sequence: Sequence) -> None:
        preempt(state, sequence)
        del sequence.token_ids[sequence.num_prompt_tokens :]

    patch.setattr(SchedulerState, "preempt", mutant)


def let_short_sequences_overtake(patch: pytest.MonkeyPatch) -> None:
    def shortest(queue: FairQueue, account: Account) -> Sequence | None:
        return min((s for s in queue.of(account) if not s.is_set_aside), key=lambda s: s.num_tokens, default=None)

    patch.setattr(FairQueue, "head_of", shortest)


def preempt_without_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(admission, "_needs_guarantee", lambda state, sequence: False)


def give_away_promised_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVCache, "num_available_blocks", lambda cache, sequence=None: cache.pool.num_free_blocks)


def accept_results_of_lost_executors(patch: pytest.MonkeyPatch) -> None:
    check_result = commit._check_result

    def mutant(state: SchedulerState, result: StepResult) -> Step:
        if state.in_flight:
            result = replace(result, epoch=state.epoch, step_id=state.in_flight[0].step_id)
        return check_result(state, result)

    patch.setattr(commit, "_check_result", mutant)


def end_a_sequence_one_token_early(patch: pytest.MonkeyPatch) -> None:
    end_sequences = commit._end_sequences

    def mutant(state: SchedulerState, step: Step, result: StepResult, events: Events) -> None:
        for sequence in step.sampled:
            if not sequence.is_finished and sequence.num_tokens == sequence.params.max_total_tokens - 1:
                state.finish(sequence)
                events.finished.append((sequence, FinishReason.LENGTH))
        end_sequences(state, step, result, events)

    patch.setattr(commit, "_end_sequences", mutant)


def report_on_the_prompt_again_after_a_preemption(patch: pytest.MonkeyPatch) -> None:
    forget_kv = Sequence.forget_kv

    def mutant(sequence: Sequence) -> None:
        sequence.num_prompt_reported = 0
        forget_kv(sequence)

    patch.setattr(Sequence, "forget_kv", mutant)


def read_prefixes_that_are_to_be_reported_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVCache, "reads_prefixes", lambda cache, sequence: cache._enable_prefix_caching)


def wait_for_prefixes_that_no_plan_computes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        admission, "_awaits_prefix", lambda state, builder, sequence, prefix: len(prefix) < len(sequence.digests)
    )


def leave_bounds_as_they_were(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SchedulerState, "narrow", lambda state, active, max_total_tokens: [])


def take_no_time_for_decodes(patch: pytest.MonkeyPatch) -> None:
    take_decodes = StepBudget.take_decodes

    def mutant(budget: StepBudget, sequences: SequenceOf[Sequence]) -> None:
        take_decodes(budget, sequences)
        budget._decodes = budget._decodes[:1]

    patch.setattr(StepBudget, "take_decodes", mutant)


def let_the_first_prompt_take_no_more_than_half(patch: pytest.MonkeyPatch) -> None:
    room_for = StepBudget.room_for
    patch.setattr(StepBudget, "room_for", lambda budget, sequence, share=1: room_for(budget, sequence, 2))


def let_prompts_alone_take_any_time(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(step_budget, "MAX_PROMPT_TIME", inf)


def keep_the_tokens_of_deferred_sequences(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SchedulerState, "defer", lambda state, sequence: None)


def admit_deferred_sequences_at_once(patch: pytest.MonkeyPatch) -> None:
    take_back = FairQueue.take_back
    patch.setattr(FairQueue, "take_back", lambda queue, now_s: take_back(queue, inf))


def forget_the_tokens_of_deferred_sequences(patch: pytest.MonkeyPatch) -> None:
    successor = Sequence.successor

    def mutant(sequence: Sequence) -> Sequence:
        new = successor(sequence)
        del new.token_ids[new.num_prompt_tokens :]
        return new

    patch.setattr(Sequence, "successor", mutant)


MUTATIONS: list[tuple[Callable[[pytest.MonkeyPatch], None], str]] = [
    (skip_one_ref_count_decrement, "I2: block"),
    (publish_blocks_when_they_are_planned, "I5: block .* is published, its KV is not computed"),
    (free_blocks_while_a_plan_in_flight_uses_them, "I6: plan"),
    (forget_the_copy_of_a_shared_block, "KV that was never written is read|I11: .* got"),
    (write_to_a_shared_block_in_place, "I3: .* may write to block"),
    (drop_one_queued_request, "I7: waiting and running|is not waiting"),
    (publish_under_another_salt, "I5: block .* is published for other tokens"),
    (send_tokens_again_after_a_recompute, "I11: .* got"),
    (count_the_token_of_an_overrun, "I11: a token of .* (after its end|before its request started)"),
    (forget_generated_tokens_when_preempting, "I11: .* got"),
    (let_short_sequences_overtake, "I13: .* overtook"),
    (preempt_without_end, "I14: .* was preempted"),
    (give_away_promised_blocks, "I10: .* blocks promised|every running sequence has its blocks promised"),
    (accept_results_of_lost_executors, "I17: a result"),
    (end_a_sequence_one_token_early, "I11: .* ended by"),
    (report_on_the_prompt_again_after_a_preemption, "I18: .* reports prompt token"),
    (read_prefixes_that_are_to_be_reported_on, "I18: (wrong log-probabilities|.* got .* prompt tokens)"),
    (wait_for_prefixes_that_no_plan_computes, "I12: .* never ended|I12: nothing is in flight"),
    (leave_bounds_as_they_were, "would fit"),
    (take_no_time_for_decodes, "I25: (the plan takes|.* could compute more)"),
    (let_the_first_prompt_take_no_more_than_half, "I25: .* could compute more"),
    (let_prompts_alone_take_any_time, "I25: the plan takes"),
    (keep_the_tokens_of_deferred_sequences, "I11: .* got|I18: wrong log-probabilities"),
    (admit_deferred_sequences_at_once, "I27: .* before their pauses"),
    (forget_the_tokens_of_deferred_sequences, "I11: .* got"),
    *beam_mutations.MUTATIONS,
    *mode_mutations.MUTATIONS,
]


def simulate_worlds() -> None:
    """Without a mutation, these worlds end well: test_simulation.py runs them."""
    for seed in range(NUM_SEEDS):
        simulate(seed)


@pytest.mark.parametrize(("mutate", "finding"), MUTATIONS, ids=[mutate.__name__ for mutate, _ in MUTATIONS])
def test_each_mutation_is_found(
    monkeypatch: pytest.MonkeyPatch, mutate: Callable[[pytest.MonkeyPatch], None], finding: str
) -> None:
    mutate(monkeypatch)
    with pytest.raises((QuireError, PlanError, AssertionError, LookupError), match=finding):
        simulate_worlds()
