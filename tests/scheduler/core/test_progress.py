"""Bounded progress: whoever is admitted ends, soon and in turn, whoever else there is.

The rig checks the bounds after every move (`rig.py`: I12 to I16). Here they are put under pressure, shown to be tight
where they are, and told as stories.
"""

from random import Random

import pytest

from scheduler.core import FCFS, POLICIES, PRIORITY, FinishReason, Policy, Request, SchedulerLimits
from scheduler.core.inspect.views import unfinished_sequences
from tests.support.core.letters import VOCAB_SIZE, make_request
from tests.support.core.rig import Rig


def build_rig(
    *requests: Request,
    num_usable_blocks: int = 100,
    block_size: int = 1,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 16,
    max_in_flight: int = 1,
    max_preemptions: int = 3,
    max_losses: int = 5,
    policy: Policy = FCFS,
) -> Rig:
    limits = SchedulerLimits(
        max_num_seqs,
        max_num_batched_tokens,
        max_model_len=100,
        max_in_flight=max_in_flight,
        max_preemptions=max_preemptions,
        max_losses=max_losses,
        watermark_ratio=0,
    )
    rig = Rig(limits, num_blocks=num_usable_blocks + 1, block_size=block_size, policy=policy, vocab_size=VOCAB_SIZE)
    rig.attach()
    for request in requests:
        rig.add(request)
    return rig


def step(rig: Rig) -> None:
    rig.schedule()
    if rig.in_flight:
        rig.commit()


def admission_order(rig: Rig) -> list[int]:
    """Runs to the end; request ids in the order in which they started."""
    rig.run()
    return list(rig.clients.num_cached_tokens)


# --- I12: everybody ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_later_arrivals_do_not_hold_up_earlier_ones(seed: int) -> None:
    """Under FCFS, requests that come later without end, one a step and all for the same few blocks, cost the earlier
    ones a bounded number of steps.

    Between two steps in which an earlier sequence gets a row nobody comes in behind it (I13); so those in the batch
    already are all that can run, and each of them ends, or gives way, within its own length.
    """
    random = Random(seed)
    rig = build_rig(
        num_usable_blocks=random.randint(6, 12),
        max_in_flight=random.randint(1, 2),
        max_preemptions=random.randint(0, 2),
    )
    max_len, max_num_seqs = 7, rig.scheduler.state.limits.max_num_seqs
    for request_id in range(4):
        rig.add(make_request(request_id, "abc"[: random.randint(1, 3)], 4, seeds=range(random.randint(1, 2))))
    max_own_rows = rig.bound.max_steps
    next_id = 4
    while any(rig.clients.open_keys(request_id) for request_id in range(4)):
        rig.add(make_request(next_id, "xyz"[: random.randint(1, 3)], random.randint(1, 4)))
        next_id += 1
        step(rig)
        assert rig.scheduler.state.counters.num_steps <= max_own_rows * (1 + max_num_seqs * max_len)
    assert rig.scheduler.state.counters.num_steps < 3 * max_own_rows, "in fact they are hardly noticed"


def test_the_bound_is_tight_for_one_sequence_that_decodes() -> None:
    """A prompt of one token and then one token a step: as many plans as tokens to compute."""
    rig = build_rig(make_request(1, "a", 9), max_preemptions=0)
    rig.run()
    assert rig.scheduler.state.counters.num_steps == rig.bound.max_steps == 9


# --- I14: preemptions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_preemptions", "num_usable_blocks", "sizes"),
    [
        (1, 10, [(2, 4), (1, 6), (2, 8)]),
        (2, 10, [(2, 4), (1, 6), (2, 8)]),
        (3, 11, [(2, 2), (2, 8), (2, 4), (2, 9)]),
    ],
)
def test_a_sequence_is_preempted_as_often_as_it_may_be_and_no_more(
    max_preemptions: int, num_usable_blocks: int, sizes: list[tuple[int, int]]
) -> None:
    requests = [make_request(i, "ab"[:num_prompt], num_output) for i, (num_prompt, num_output) in enumerate(sizes)]
    rig = build_rig(*requests, num_usable_blocks=num_usable_blocks, max_preemptions=max_preemptions)
    last = list(unfinished_sequences(rig.scheduler.state))[-1]
    rig.run()
    assert last.num_preemptions == max_preemptions


def test_a_sequence_that_may_not_be_preempted_waits_for_all_the_blocks_it_can_need() -> None:
    first, second = make_request(1, "ab", 4), make_request(2, "xy", 4)
    rig = build_rig(first, second, num_usable_blocks=9, max_preemptions=0)
    step(rig)
    assert [s.request.request_id for s in rig.scheduler.state.batch.running] == [1], (
        "two times five blocks are not nine"
    )
    rig.run()
    assert rig.scheduler.state.counters.num_preemptions == 0


def test_a_sample_is_born_without_a_guarantee_and_gets_one_when_it_is_preempted() -> None:
    """The exception to the bound: with max_preemptions 0, a forked sample can still be preempted, once."""
    rig = build_rig(make_request(1, "ab", 4, seeds=(1, 2)), num_usable_blocks=6, max_preemptions=0)
    step(rig)
    parent, child = rig.scheduler.state.batch.running
    assert (parent.is_guaranteed, child.is_guaranteed) == (True, False)
    rig.run()
    assert (parent.num_preemptions, child.num_preemptions) == (0, 1)


# --- I15: decodes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_long_prompt_does_not_hold_up_a_decode(max_in_flight: int) -> None:
    rig = build_rig(make_request(1, "a", 30), max_num_batched_tokens=5, max_in_flight=max_in_flight)
    step(rig)
    rig.add(make_request(2, "abcdefghijklmnopqrstuvwxyz", 1))
    num_tokens = [len(rig.clients.received[1, 0])]
    while rig.clients.open_keys(2):
        step(rig)
        num_tokens.append(len(rig.clients.received[1, 0]))
    assert num_tokens == list(range(1, 1 + len(num_tokens))), "a token a step"
    assert len(num_tokens) - 1 == 7, "26 prompt tokens, four a step beside the decode"


# --- I13: order -------------------------------------------------------------------------------------------------


def test_a_small_request_does_not_overtake_a_big_one() -> None:
    running, big, small = make_request(1, "abcdef", 4), make_request(2, "ghijkl", 1), make_request(3, "m", 1)
    rig = build_rig(running, big, small, num_usable_blocks=9)
    step(rig)
    assert rig.scheduler.state.cache.pool.num_free_blocks == 3, "room for the small one"
    assert admission_order(rig) == [1, 2, 3]


def test_fcfs_is_deaf_to_priorities() -> None:
    requests = [make_request(i, "ab", 3, priority=-i) for i in range(5)]
    assert admission_order(build_rig(*requests, max_num_seqs=1)) == [0, 1, 2, 3, 4]


def test_under_priority_the_urgent_come_first_and_equals_in_turn() -> None:
    priorities = [2, 0, 1, 0, 2]
    requests = [make_request(i, "ab", 3, priority=priority) for i, priority in enumerate(priorities)]
    assert admission_order(build_rig(*requests, max_num_seqs=1, policy=PRIORITY)) == [1, 3, 2, 0, 4]


@pytest.mark.parametrize(("policy", "victim"), [(FCFS, 2), (PRIORITY, 1)])
def test_the_victim_is_the_last_in_order(policy: Policy, victim: int) -> None:
    """FCFS: the latest. Priority: the least urgent, though it was first."""
    requests = [make_request(1, "ab", 6, priority=5), make_request(2, "xy", 6, priority=1)]
    rig = build_rig(*requests, num_usable_blocks=8, policy=policy)
    sequences = {s.request.request_id: s for s in unfinished_sequences(rig.scheduler.state)}
    rig.run()
    assert [i for i, sequence in sequences.items() if sequence.num_preemptions] == [victim]


def test_who_was_preempted_comes_back_before_those_who_came_later() -> None:
    first, second, third = make_request(1, "ab", 6), make_request(2, "xy", 6), make_request(3, "m", 1)
    rig = build_rig(first, second, num_usable_blocks=8)
    step(rig)
    while not rig.scheduler.num_waiting:
        step(rig)
    rig.add(third)
    assert [s.request.request_id for s in rig.scheduler.state.waiting] == [2, 3]
    assert admission_order(rig) == [1, 2, 3]


# --- I16: whoever kills executors is found ----------------------------------------------------------------------


POISON = 100


def run_with_poison(rig: Rig) -> int:
    """An executor dies whenever it is given a plan with rows of the poison request; returns how many did."""
    num_deaths = 0
    while rig.scheduler.num_unfinished_requests or rig.in_flight:
        if rig.executor is None:
            rig.attach()
        rig.schedule()
        if any(sequence.request.request_id == POISON for sequence in rig.scheduler.state.batch.running):
            num_deaths += 1
            rig.lose()
        elif rig.in_flight:
            rig.commit()
    rig.assert_idle()
    return num_deaths


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("position", [0, 2, 4])
@pytest.mark.parametrize("max_losses", [2, 5])
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_poison_request_fails_alone(policy: Policy, position: int, max_losses: int, max_in_flight: int) -> None:
    requests = [make_request(i, "abcde"[: i + 1], 6, seeds=range(1 + i % 2)) for i in range(4)]
    requests.insert(position, make_request(POISON, "wxyz", 6))
    rig = build_rig(*requests, policy=policy, max_losses=max_losses, max_in_flight=max_in_flight)
    assert run_with_poison(rig) == max_losses + 1
    rig.clients.assert_served()
    assert rig.clients.ended.pop((POISON, 0)) is FinishReason.ERROR
    assert set(rig.clients.ended.values()) == {FinishReason.LENGTH}, "all neighbours have all their tokens"


@pytest.mark.parametrize("num_sequences", [2, 3])
def test_a_poison_request_of_several_samples_fails_as_a_whole(num_sequences: int) -> None:
    poison = make_request(POISON, "wxyz", 6, seeds=range(num_sequences))
    rig = build_rig(make_request(1), poison, make_request(2), max_in_flight=2)
    assert run_with_poison(rig) <= num_sequences * (rig.scheduler.state.limits.max_losses + 1)
    assert {rig.clients.ended.pop((POISON, index)) for index in range(num_sequences)} <= {
        FinishReason.ERROR,
        FinishReason.CANCELLED,
    }
    assert set(rig.clients.ended.values()) == {FinishReason.LENGTH}


def test_neighbours_of_a_poison_request_are_suspects_until_their_next_token() -> None:
    rig = build_rig(make_request(1, "abc", 9), make_request(POISON, "xyz", 9), make_request(2, "def", 9))
    for _ in range(2):
        rig.schedule()
        assert rig.scheduler.num_waiting == 0
        rig.lose()
        rig.attach()
    assert all(sequence.is_suspect for sequence in unfinished_sequences(rig.scheduler.state))
    step(rig)
    (alone,) = rig.scheduler.state.batch.running
    assert alone.request.request_id == 1
    assert not alone.is_suspect
    rig.add(make_request(3))
    step(rig)
    assert len(list(rig.scheduler.state.batch.running)) == 1, "the next suspect in line wants to be alone, too"


def test_executors_that_die_of_old_age_fail_nobody() -> None:
    """A loss counts against a sequence only if no token came since the one before."""
    rig = build_rig(make_request(1, "abc", 20), make_request(2, "de", 20), max_losses=2)
    while rig.scheduler.num_unfinished_requests:
        step(rig)
        step(rig)
        if rig.scheduler.num_unfinished_requests:
            rig.lose()
            rig.attach()
    rig.clients.assert_served()
    assert set(rig.clients.ended.values()) == {FinishReason.LENGTH}
