"""Batching modes: who joins whom, and when; and that each of them ends all it has begun, with every memory mode."""

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
)
from scheduler.core.baselines.batching import batch_members
from tests.support.core.letters import VOCAB_SIZE, make_request
from tests.support.core.rig import Rig


def build_rig(batching: Batching, *, max_num_seqs: int = 3, num_usable_blocks: int = 50, **options: object) -> Rig:
    limits = SchedulerLimits(max_num_seqs, 16, 20, max_in_flight=1, watermark_ratio=0)
    rig = Rig(
        limits,
        num_blocks=num_usable_blocks + 1,
        block_size=2,
        vocab_size=VOCAB_SIZE,
        batching=batching,
        **options,  # type: ignore[arg-type]  # a test's own
    )
    rig.attach()
    return rig


def step(rig: Rig) -> None:
    rig.schedule()
    rig.commit()


def num_steps_to_serve(batching: Batching) -> int:
    """Six requests, two long ones among them, in three slots."""
    rig = build_rig(batching)
    for request_id, max_tokens in enumerate((9, 2, 2, 9, 2, 2)):
        rig.add(make_request(request_id, "ab", max_tokens))
    rig.run()
    return rig.scheduler.state.counters.num_steps


def test_a_slot_that_is_refilled_saves_steps() -> None:
    """Static: two batches, each as long as its longest. Continuous: the second long one comes in after two steps."""
    assert num_steps_to_serve(STATIC) == 9 + 9
    assert num_steps_to_serve(CONTINUOUS) == 2 + 9


def test_a_static_batch_is_what_waits_however_little() -> None:
    rig = build_rig(STATIC)
    rig.add(make_request(1))
    step(rig)
    assert batch_members(rig.scheduler.state) == [1]


def test_a_request_takes_the_places_of_all_its_sequences() -> None:
    rig = build_rig(STATIC, max_num_seqs=4)
    rig.add(make_request(1, seeds=range(2)))
    rig.add(make_request(2, beam=BeamParams(3, 1)))
    rig.add(make_request(3))
    step(rig)
    assert batch_members(rig.scheduler.state) == [1], (
        "two slots are left, request 2 takes three, and nobody overtakes it"
    )
    while batch_members(rig.scheduler.state) == [1]:
        step(rig)
    step(rig)
    assert batch_members(rig.scheduler.state) == [2, 3]
    rig.run()


def test_a_batch_that_does_not_fit_a_step_or_the_pool_comes_in_bit_by_bit() -> None:
    rig = build_rig(STATIC, num_usable_blocks=10)
    for request_id in range(3):
        rig.add(make_request(request_id, "abcdefgh"[request_id:], 6))
    step(rig)
    assert batch_members(rig.scheduler.state) == [0, 1, 2]
    assert rig.scheduler.num_waiting == 1
    rig.add(make_request(9, "x", 1))
    rig.run()
    assert rig.scheduler.state.counters.num_preemptions > 0, "who was preempted stays a member"
    assert list(rig.clients.num_cached_tokens) == [0, 1, 2, 9]


def test_an_urgent_request_does_not_join_a_batch_that_runs() -> None:
    """It is the head of the queue, and the members behind it come in all the same."""
    rig = build_rig(STATIC, policy=PRIORITY)
    for request_id in range(3):
        rig.add(make_request(request_id, "abcdefgh", 3, priority=5))
    step(rig)
    assert rig.scheduler.num_waiting > 0
    rig.add(make_request(9, "x", 1, priority=0))
    rig.run()
    assert list(rig.clients.num_cached_tokens) == [0, 1, 2, 9]


def test_a_batch_survives_its_executor() -> None:
    rig = build_rig(STATIC)
    for request_id in range(4):
        rig.add(make_request(request_id))
    rig.schedule()
    rig.lose()
    assert batch_members(rig.scheduler.state) == [0, 1, 2]
    rig.attach()
    rig.run()


def test_a_batch_whose_members_are_all_cancelled_makes_room() -> None:
    rig = build_rig(STATIC, max_num_seqs=2)
    for request_id in range(4):
        rig.add(make_request(request_id))
    rig.schedule()
    for request_id in (0, 1):
        rig.cancel(request_id)
    assert batch_members(rig.scheduler.state) == []
    rig.commit()
    step(rig)
    assert batch_members(rig.scheduler.state) == [2, 3]


# --- dynamic: the clock -----------------------------------------------------------------------------------------


def test_a_batch_is_waited_for_until_its_first_request_has_waited_long_enough() -> None:
    rig = build_rig(replace(DYNAMIC, timeout_s=2.0))
    rig.expire(100.0)
    rig.add(make_request(1))
    rig.expire(101.0)
    rig.add(make_request(2))
    assert rig.scheduler.next_wake_s == 102.0
    assert rig.schedule() is None
    rig.expire(102.0)
    assert rig.schedule() is not None
    assert batch_members(rig.scheduler.state) == [1, 2]
    assert rig.scheduler.next_wake_s is None, "it runs; nothing is waited for but results"


def test_a_full_batch_is_not_waited_for() -> None:
    rig = build_rig(DYNAMIC)
    for request_id in range(3):
        rig.add(make_request(request_id))
    assert rig.schedule() is not None


def test_what_came_while_a_batch_ran_has_waited_since_then() -> None:
    rig = build_rig(replace(DYNAMIC, timeout_s=2.0), max_num_seqs=1)
    rig.add(make_request(1, "ab", 1))
    step(rig)
    rig.expire(1.0)
    rig.add(make_request(2))
    assert rig.schedule() is not None, "one slot: one request is a full batch"


def test_a_deadline_and_a_batch_wake_whichever_is_first() -> None:
    rig = build_rig(replace(DYNAMIC, timeout_s=2.0))
    rig.add(make_request(1, deadline_s=1.0))
    assert rig.scheduler.next_wake_s == 1.0
    rig.expire(1.0)
    assert rig.scheduler.next_wake_s is None
    rig.add(make_request(2, deadline_s=9.0))
    assert rig.scheduler.next_wake_s == 3.0


def test_without_a_clock_nobody_waits_for_it() -> None:
    """A caller that never tells the time gets static batching, and no deadlock."""
    scheduler = Scheduler(SchedulerLimits(2, 8, 20), num_blocks=9, block_size=4, batching=DYNAMIC)
    scheduler.executor_attached(1, 9)
    scheduler.add(make_request(1))
    assert scheduler.schedule() is not None


# --- all of them, in any memory ---------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", KV_ALLOCATIONS.values(), ids=KV_ALLOCATIONS)
@pytest.mark.parametrize("batching", BATCHING.values(), ids=BATCHING)
def test_everybody_ends_in_every_mode(batching: Batching, memory: KVAllocation) -> None:
    """And gets the same tokens: the rig's clients know them in advance."""
    rig = build_rig(batching, kv_allocation=memory, num_usable_blocks=21)
    for request_id in range(12):
        rig.add(make_request(request_id, "abcdefgh"[request_id % 5 :], 1 + request_id % 7))
    for _ in range(4):
        rig.expire(rig.now_s + 0.02)
        rig.schedule()
        if rig.in_flight:
            rig.commit()
    rig.cancel(4)
    rig.lose()
    rig.attach()
    rig.run()
    assert len(rig.clients.ended) == 12
