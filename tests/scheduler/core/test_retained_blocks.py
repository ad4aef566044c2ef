"""A prefix cache that outlives its scheduler: blocks that an executor retains are found, right, and evictable."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from scheduler.core import (
    BeamParams,
    FinishReason,
    InvariantViolation,
    Request,
    SchedulerLimits,
    SequenceParams,
    check_invariants,
)
from scheduler.core.block_pool import BlockPool
from scheduler.core.kv_cache import KVCache
from scheduler.core.prefix_index import PrefixIndex
from tests.support.core.fake_executor import PlanError
from tests.support.core.harness import Harness

if TYPE_CHECKING:
    from collections.abc import Callable

LIMITS = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=40)


def new_harness(num_blocks: int = 30, **options: object) -> Harness:
    harness = Harness(LIMITS, num_blocks=num_blocks, block_size=4, retains=True, **options)  # type: ignore[arg-type]
    harness.attach()
    return harness


def request(number: int, prompt: list[int], max_tokens: int = 3, salt: bytes = b"", num_samples: int = 1) -> Request:
    params = SequenceParams(max_total_tokens=len(prompt) + max_tokens)
    return Request(number, prompt, params, seeds=tuple(range(num_samples)), cache_salt=salt)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices((0, 1), k=length)


def settle(harness: Harness) -> None:
    """Serves all requests, and tells the executor what was published last."""
    harness.run()
    while harness.schedule() is not None:
        harness.commit()


def restarted(harness: Harness, num_unexecuted: int = 0, **options: object) -> Harness:
    """Returns a new scheduler with new clients, attached to the executor of another scheduler."""
    successor = Harness(
        LIMITS,
        num_blocks=harness.num_blocks,
        block_size=4,
        retains=True,
        **options,  # type: ignore[arg-type]
    )
    successor.last_executor = harness.executor
    successor.attach(num_unexecuted=num_unexecuted)
    return successor


def num_hits(harness: Harness) -> int:
    return harness.scheduler.state.counters.num_prefix_hit_tokens


def test_a_restarted_scheduler_computes_no_full_block_again() -> None:
    first, prompt = new_harness(), prompt_of(22)
    first.add(request(1, prompt))
    settle(first)
    second = restarted(first)
    second.add(request(1, prompt))
    settle(second)  # the harness compares every token
    assert num_hits(second) == 20
    assert second.scheduler.state.counters.num_prefix_queried_tokens == 22


def test_a_running_sequence_goes_on_from_its_last_full_block_when_the_connection_returns() -> None:
    harness, prompt = new_harness(), prompt_of(13)
    harness.add(request(1, prompt, max_tokens=20))
    for _ in range(8):
        harness.schedule()
        harness.commit()
    (sequence,) = harness.scheduler.state.batch.running
    num_tokens = sequence.num_tokens
    harness.schedule()  # the engine sends this plan before it tells the client of the last token
    harness.lose()
    harness.attach(num_unexecuted=0)
    plan = harness.schedule()
    assert plan is not None
    assert plan.num_tokens == num_tokens - plan.admissions[0].num_computed_tokens <= 4
    settle(harness)


def test_the_last_blocks_are_told_although_no_request_is_left() -> None:
    """A request with one token of output has no second plan that could tell of its prompt."""
    first, prompt = new_harness(), prompt_of(16)
    first.add(request(1, prompt, max_tokens=1))
    plans = []
    while (plan := first.schedule()) is not None:
        plans.append((plan.num_tokens, len(plan.published)))
        first.commit()
    assert plans == [(16, 0), (0, 4)]
    assert first.scheduler.schedule() is None, "what the executor knows is not told again"
    second = restarted(first)
    second.add(request(1, prompt, max_tokens=1))
    settle(second)
    assert num_hits(second) == 12


def test_salts_are_part_of_the_digests() -> None:
    first, prompt = new_harness(), prompt_of(22)
    first.add(request(1, prompt, salt=b"mine"))
    settle(first)
    second = restarted(first)
    second.add(request(1, prompt, salt=b"theirs"))
    settle(second)
    assert num_hits(second) == 0


@pytest.mark.parametrize("is_attached", [True, False])
def test_a_reset_prefix_cache_does_not_come_back(is_attached: bool) -> None:
    harness, prompt = new_harness(), prompt_of(22)
    harness.add(request(1, prompt))
    settle(harness)
    executor = harness.executor
    assert executor is not None
    assert executor.digests
    if is_attached:
        assert harness.reset_prefix_cache() == len(executor.digests)
    else:
        harness.lose()
        assert harness.reset_prefix_cache() == 0
        harness.attach(num_unexecuted=0)
    settle(harness)
    assert harness.executor is not None
    assert not harness.executor.digests
    second = restarted(harness)
    second.add(request(1, prompt))
    settle(second)
    assert num_hits(second) == 0


@pytest.mark.parametrize("is_sent", [True, False])
def test_a_reset_that_did_not_reach_the_executor_is_repeated(is_sent: bool) -> None:
    harness, prompt = new_harness(), prompt_of(22)
    harness.add(request(1, prompt))
    settle(harness)
    harness.reset_prefix_cache()
    if is_sent:
        plan = harness.schedule()
        assert plan is not None
        assert plan.withdrawn_blocks
    harness.lose()
    harness.attach(num_unexecuted=int(is_sent))
    assert harness.executor is not None
    assert harness.executor.digests
    harness.add(request(2, prompt))
    settle(harness)
    assert num_hits(harness) == 0


def test_a_sequence_whose_numbers_are_not_finite_leaves_no_block_behind() -> None:
    """Neither the blocks of the faulty step nor those of the prompt, whose numbers may be the cause."""
    harness, prompt = new_harness(), prompt_of(22)
    harness.add(request(1, prompt, max_tokens=9))
    for _ in range(5):
        harness.schedule()
        harness.commit()
    scheduler = harness.scheduler
    assert harness.executor is not None
    assert harness.executor.digests
    plan = harness.schedule()
    assert plan is not None
    result = harness.in_flight.popleft().result
    scheduler.commit(replace(result, end_reasons=[FinishReason.NOT_FINITE]))
    check_invariants(scheduler)
    assert not len(scheduler.state.cache.index)
    assert not scheduler.state.cache.index.published
    news = scheduler.schedule()
    assert news is not None
    harness.executor.execute(news)
    assert not harness.executor.digests


def test_a_block_that_becomes_full_in_the_faulty_step_is_not_published() -> None:
    harness = new_harness()
    harness.add(request(1, prompt_of(8), max_tokens=9))
    harness.schedule()
    result = harness.in_flight.popleft().result
    harness.scheduler.commit(replace(result, end_reasons=[FinishReason.NOT_FINITE]))
    assert not len(harness.scheduler.state.cache.index)
    assert harness.scheduler.schedule() is None


@pytest.mark.parametrize("reports_on", ["prompt", "beams"])
def test_reports_that_are_not_finite_leave_no_block_behind(reports_on: str) -> None:
    harness, prompt = new_harness(), prompt_of(14)
    asked = request(1, prompt, max_tokens=20)
    if reports_on == "prompt":
        asked = replace(asked, params=replace(asked.params, num_prompt_logprobs=1))
    else:
        asked = replace(asked, beam=BeamParams(2, 2))
    harness.add(asked)
    for _ in range(0 if reports_on == "prompt" else 12):
        harness.schedule()
        harness.commit()
    scheduler = harness.scheduler
    harness.schedule()
    index = scheduler.state.cache.index
    held = {block for sequence in scheduler.state.batch.running for block in sequence.block_table}
    assert any(block in index for block in held) == (reports_on == "beams")
    result = harness.in_flight.popleft().result
    name = "prompt_logprobs" if reports_on == "prompt" else "candidates"
    report = getattr(result, name)
    events = scheduler.commit(replace(result, **{name: replace(report, values=[math.nan] * len(report.values))}))
    assert [reason for _, reason in events.finished] == [FinishReason.NOT_FINITE]
    check_invariants(scheduler)
    assert not any(block in index for block in held)


def test_retained_blocks_are_reused_after_all_others_and_the_first_of_a_prefix_last() -> None:
    first = new_harness(num_blocks=12)
    first.add(request(1, prompt_of(17)))
    settle(first)
    assert first.executor is not None
    published = list(first.executor.digests)
    second = restarted(first)
    free = list(second.scheduler.state.cache.pool.free_blocks())
    assert free[-len(published) :] == published[::-1]
    assert sorted(free) == list(range(1, 12))


def test_without_prefix_caching_nothing_is_published_and_nothing_adopted() -> None:
    first, prompt = new_harness(), prompt_of(22)
    first.add(request(1, prompt))
    settle(first)
    cache = KVCache(30, 4, enable_prefix_caching=False)
    assert first.executor is not None
    cache.restore(list(first.executor.digests.items()))
    assert not len(cache.index)
    assert not cache.index.has_news
    assert list(cache.pool.free_blocks()) == list(range(1, 30))


def test_blocks_with_equal_digests_are_found_once_and_withdrawn_otherwise() -> None:
    cache = KVCache(9, 4)
    cache.restore([(3, b"a"), (5, b"a"), (4, b"b")])
    assert dict(cache.index.items()) == {b"a": 3, b"b": 4}
    assert cache.index.take_news() == ({}, [5])


def test_an_executor_that_retains_nothing_is_told_nothing() -> None:
    harness = Harness(LIMITS, num_blocks=30, block_size=4)  # its executor refuses publications
    harness.attach()
    harness.add(request(1, prompt_of(22)))
    harness.run()
    harness.reset_prefix_cache()
    assert harness.schedule() is None


def random_life(seed: int) -> int:
    """Serves random requests while connections break, schedulers are replaced and caches are reset.

    Returns the number of tokens that restarted schedulers found in blocks they have not written.
    """
    draw, num_found = random.Random(seed), 0
    harness = new_harness(num_blocks=draw.choice((12, 16, 30)))
    for _ in range(6):
        for _ in range(draw.randint(1, 6)):
            prompt = prompt_of(draw.randint(1, 9), seed=draw.randint(0, 2)) * draw.randint(1, 3)
            known = len(harness.clients.requests)
            harness.add(request(known, prompt, draw.randint(1, 9), draw.choice((b"", b"salt")), draw.choice((1, 1, 2))))
            for _ in range(draw.randint(0, 6)):
                if harness.in_flight and draw.random() < 0.6:
                    harness.commit()
                else:
                    harness.schedule()
            if draw.random() < 0.05:
                harness.reset_prefix_cache()
        if draw.random() < 0.5:
            harness.lose()
            if draw.random() < 0.1:
                harness.reset_prefix_cache()
            harness.attach(num_unexecuted=draw.randint(0, harness.num_lost_plans))
        if draw.random() < 0.5:
            settle(harness)
        num_before = num_hits(harness)
        harness = restarted(harness, num_unexecuted=draw.randint(0, len(harness.in_flight)))
        num_found += num_before
    settle(harness)
    return num_found


@pytest.mark.parametrize("seed", range(30))
def test_outputs_are_the_same_over_restarts_of_the_scheduler(seed: int) -> None:
    """The harness knows each token in advance, and checks the invariants after each move."""
    random_life(seed)


def test_random_lives_find_retained_blocks() -> None:
    assert sum(random_life(seed) for seed in range(100, 110)) > 100


def forget_to_forget(patch: pytest.MonkeyPatch) -> None:
    """A reset that tells the executor nothing."""
    patch.setattr(PrefixIndex, "withdraw", PrefixIndex.forget)


def publish_when_planned(patch: pytest.MonkeyPatch) -> None:
    """Blocks are told before the step that fills them has ended."""
    adopt = KVCache.adopt

    def mutant(cache: KVCache, sequence: object, prefix: list[int]) -> None:
        adopt(cache, sequence, prefix)  # type: ignore[arg-type]
        cache.index.published |= dict.fromkeys(list(cache.pool.free_blocks())[:1], b"early")

    patch.setattr(KVCache, "adopt", mutant)


def keep_telling_of_a_taken_block(patch: pytest.MonkeyPatch) -> None:
    """A block that was published is evicted before the executor was told, and told all the same."""
    forget = PrefixIndex.forget

    def mutant(index: PrefixIndex, block: int) -> None:
        told = index.published.get(block)
        forget(index, block)
        if told is not None:
            index.published[block] = told

    patch.setattr(PrefixIndex, "forget", mutant)


def restore_shifted_blocks(patch: pytest.MonkeyPatch) -> None:
    """Digests are taken for those of other blocks."""
    restore = KVCache.restore

    def mutant(cache: KVCache, retained: list[tuple[int, bytes]]) -> None:
        blocks = [block for block, _ in retained]
        restore(cache, list(zip(blocks[1:] + blocks[:1], [digest for _, digest in retained], strict=True)))

    patch.setattr(KVCache, "restore", mutant)


def restore_blocks_as_taken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "keep_longest", BlockPool.retain)


@pytest.mark.parametrize(
    "mutation",
    [
        forget_to_forget,
        publish_when_planned,
        keep_telling_of_a_taken_block,
        restore_shifted_blocks,
        restore_blocks_as_taken,
    ],
)
def test_planted_mistakes_are_found(mutation: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch):
    mutation(monkeypatch)
    with pytest.raises((AssertionError, InvariantViolation, PlanError)):
        sum(random_life(seed) for seed in range(100))
