"""Batching modes: which requests form a batch, and when. Every mode ends all requests under every KV allocation."""

from dataclasses import replace

import pytest

from scheduler.core import (
    BATCHING,
    CONTINUOUS,
    DYNAMIC,
    KV_ALLOCATIONS,
    PRIORITY,
    STATIC,
    Batching,
    BeamParams,
    KVAllocation,
    Scheduler,
    SchedulerLimits,
    StepResult,
    TenantTerms,
    check_invariants,
)
from scheduler.core.baselines.batching import batch_members
from tests.support.core.harness import Harness
from tests.support.core.letter_tokens import VOCAB_SIZE, make_request


def build_harness(
    batching: Batching, *, max_num_seqs: int = 3, num_usable_blocks: int = 50, **options: object
) -> Harness:
    limits = SchedulerLimits(max_num_seqs, 16, 20, max_in_flight=1, watermark_ratio=0)
    harness = Harness(
        limits,
        num_blocks=num_usable_blocks + 1,
        block_size=2,
        vocab_size=VOCAB_SIZE,
        batching=batching,
        **options,  # type: ignore[arg-type]  # a test's own
    )
    harness.attach()
    return harness


def step(harness: Harness) -> None:
    harness.schedule()
    harness.commit()


def num_steps_to_serve(batching: Batching) -> int:
    """Serves six requests, two of them long, in three slots; returns the number of steps."""
    harness = build_harness(batching)
    for request_id, max_tokens in enumerate((9, 2, 2, 9, 2, 2)):
        harness.add(make_request(request_id, "ab", max_tokens))
    harness.run()
    return harness.scheduler.state.counters.num_steps


def test_refilling_slots_saves_steps() -> None:
    """Static: two batches, each as long as its longest. Continuous: the second long one starts after two steps."""
    assert num_steps_to_serve(STATIC) == 9 + 9
    assert num_steps_to_serve(CONTINUOUS) == 2 + 9


def test_a_static_batch_takes_all_waiting_requests_even_if_there_is_only_one() -> None:
    harness = build_harness(STATIC)
    harness.add(make_request(1))
    step(harness)
    assert batch_members(harness.scheduler.state) == [1]


@pytest.mark.parametrize("batching", BATCHING.values(), ids=BATCHING)
def test_no_mode_runs_more_sequences_of_a_tenant_than_it_may_run(batching: Batching) -> None:
    """The other members of a closed batch, and the tenant's own behind the first, wait or run as slots allow."""
    limits = SchedulerLimits(6, 16, 20, max_in_flight=1, watermark_ratio=0)
    terms = {"capped": TenantTerms(max_num_seqs=2)}
    batching = replace(batching, timeout_s=0.0)
    core = Scheduler(
        limits, num_blocks=50, block_size=2, batching=batching, terms_of=lambda name: terms.get(name, TenantTerms())
    )
    core.executor_attached(1, 50)
    for request_id, num_samples in enumerate((1, 2, 1)):
        core.add(make_request(request_id, "ab", 4, seeds=range(num_samples), tenant="capped"))
    core.add(make_request(3, "ab", 4, tenant="free"))
    most = 0
    while core.num_unfinished_requests:
        plan = core.schedule()
        assert plan is not None
        running = [sequence.request for sequence in core.state.batch.running]
        most = max(most, sum(request.tenant == "capped" for request in running))
        num_sampled = len(core.state.in_flight[-1].sampled)
        core.commit(StepResult(plan.epoch, plan.step_id, [0] * num_sampled))
        check_invariants(core)
    assert most == 2


def test_a_request_takes_slots_for_all_its_sequences() -> None:
    harness = build_harness(STATIC, max_num_seqs=4)
    harness.add(make_request(1, seeds=range(2)))
    harness.add(make_request(2, beam=BeamParams(3, 1)))
    harness.add(make_request(3))
    step(harness)
    assert batch_members(harness.scheduler.state) == [1], (
        "request 2 takes three slots, two are left, and request 3 does not overtake"
    )
    while batch_members(harness.scheduler.state) == [1]:
        step(harness)
    step(harness)
    assert batch_members(harness.scheduler.state) == [2, 3]
    harness.run()


def test_members_that_do_not_fit_a_step_or_the_pool_are_admitted_later() -> None:
    harness = build_harness(STATIC, num_usable_blocks=10)
    for request_id in range(3):
        harness.add(make_request(request_id, "abcdefgh"[request_id:], 6))
    step(harness)
    assert batch_members(harness.scheduler.state) == [0, 1, 2]
    assert harness.scheduler.num_waiting == 1
    harness.add(make_request(9, "x", 1))
    harness.run()
    assert harness.scheduler.state.counters.num_preemptions > 0, "a preempted member stays a member"
    assert list(harness.clients.num_cached_tokens) == [0, 1, 2, 9]


def test_an_urgent_request_does_not_join_a_running_batch() -> None:
    """The urgent request is the head of the queue, but the members behind it are admitted first."""
    harness = build_harness(STATIC, policy=PRIORITY)
    for request_id in range(3):
        harness.add(make_request(request_id, "abcdefgh", 3, priority=5))
    step(harness)
    assert harness.scheduler.num_waiting > 0
    harness.add(make_request(9, "x", 1, priority=0))
    harness.run()
    assert list(harness.clients.num_cached_tokens) == [0, 1, 2, 9]


def test_a_batch_keeps_its_members_when_the_executor_is_lost() -> None:
    harness = build_harness(STATIC)
    for request_id in range(4):
        harness.add(make_request(request_id))
    harness.schedule()
    harness.lose()
    assert batch_members(harness.scheduler.state) == [0, 1, 2]
    harness.attach()
    harness.run()


def test_the_next_batch_is_formed_when_all_members_are_cancelled() -> None:
    harness = build_harness(STATIC, max_num_seqs=2)
    for request_id in range(4):
        harness.add(make_request(request_id))
    harness.schedule()
    for request_id in (0, 1):
        harness.cancel(request_id)
    assert batch_members(harness.scheduler.state) == []
    harness.commit()
    step(harness)
    assert batch_members(harness.scheduler.state) == [2, 3]


# --- dynamic: the clock -----------------------------------------------------------------------------------------


def test_a_batch_is_formed_when_its_first_request_has_waited_for_the_timeout() -> None:
    harness = build_harness(replace(DYNAMIC, timeout_s=2.0))
    harness.expire(100.0)
    harness.add(make_request(1))
    harness.expire(101.0)
    harness.add(make_request(2))
    assert harness.scheduler.next_wake_s == 102.0
    assert harness.schedule() is None
    harness.expire(102.0)
    assert harness.schedule() is not None
    assert batch_members(harness.scheduler.state) == [1, 2]
    assert harness.scheduler.next_wake_s is None, "the batch runs, and only results are due"


def test_a_full_batch_starts_at_once() -> None:
    harness = build_harness(DYNAMIC)
    for request_id in range(3):
        harness.add(make_request(request_id))
    assert harness.schedule() is not None


def test_a_request_that_arrives_while_a_batch_runs_can_form_the_next() -> None:
    harness = build_harness(replace(DYNAMIC, timeout_s=2.0), max_num_seqs=1)
    harness.add(make_request(1, "ab", 1))
    step(harness)
    harness.expire(1.0)
    harness.add(make_request(2))
    assert harness.schedule() is not None, "one slot: one request is a full batch"


def test_the_next_wake_is_the_earlier_of_deadline_and_batch() -> None:
    harness = build_harness(replace(DYNAMIC, timeout_s=2.0))
    harness.add(make_request(1, deadline_s=1.0))
    assert harness.scheduler.next_wake_s == 1.0
    harness.expire(1.0)
    assert harness.scheduler.next_wake_s is None
    harness.add(make_request(2, deadline_s=9.0))
    assert harness.scheduler.next_wake_s == 3.0


def test_a_dynamic_batch_does_not_wait_if_the_clock_is_never_advanced() -> None:
    """A caller that never passes the time gets static batching instead of a deadlock."""
    scheduler = Scheduler(SchedulerLimits(2, 8, 20), num_blocks=9, block_size=4, batching=DYNAMIC)
    scheduler.executor_attached(1, 9)
    scheduler.add(make_request(1))
    assert scheduler.schedule() is not None


# --- every mode and KV allocation -------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_allocation", KV_ALLOCATIONS.values(), ids=KV_ALLOCATIONS)
@pytest.mark.parametrize("batching", BATCHING.values(), ids=BATCHING)
def test_all_requests_end_in_every_mode(batching: Batching, kv_allocation: KVAllocation) -> None:
    """All requests also get the same tokens, which the harness's clients know in advance."""
    harness = build_harness(batching, kv_allocation=kv_allocation, num_usable_blocks=21)
    for request_id in range(12):
        harness.add(make_request(request_id, "abcdefgh"[request_id % 5 :], 1 + request_id % 7))
    for _ in range(4):
        harness.expire(harness.now_s + 0.02)
        harness.schedule()
        if harness.in_flight:
            harness.commit()
    harness.cancel(4)
    harness.lose()
    harness.attach()
    harness.run()
    assert len(harness.clients.ended) == 12
