"""Bounded progress: every admitted request ends within a bound and in order, however many other requests arrive.

The harness checks the bounds after every move (`checked_scheduler.py`: I12 to I16). These tests create the worst
cases, show which bounds are tight, and give examples.
"""

from collections.abc import Callable
from random import Random

import pytest

from scheduler.core import FCFS, POLICIES, PRIORITY, BeamParams, FinishReason, Policy, Request
from scheduler.core.inspect.views import unfinished_sequences
from tests.support.core.harness import Harness
from tests.support.core.letter_tokens import make_request
from tests.support.core.small_harness import build_harness


def step(harness: Harness) -> None:
    harness.schedule()
    if harness.in_flight:
        harness.commit()


def admission_order(harness: Harness) -> list[int]:
    """Runs to the end; returns request ids in the order in which they started."""
    harness.run()
    return list(harness.clients.num_cached_tokens)


# --- I12: every request ends ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_later_arrivals_delay_earlier_ones_by_a_bounded_number_of_steps(seed: int) -> None:
    """Under FCFS an endless stream of later requests costs earlier ones a bounded number of steps.

    One request arrives at each step, and all need the same few blocks. Between two steps in which an earlier sequence
    gets a row no sequence is admitted behind it (I13). So only those in the batch already can run, and each of them
    ends, or is preempted, within its own length.
    """
    random = Random(seed)
    harness = build_harness(
        num_usable_blocks=random.randint(6, 12),
        max_in_flight=random.randint(1, 2),
        max_preemptions=random.randint(0, 2),
    )
    max_len, max_num_seqs = 7, harness.scheduler.state.limits.max_num_seqs
    for request_id in range(4):
        harness.add(make_request(request_id, "abc"[: random.randint(1, 3)], 4, seeds=range(random.randint(1, 2))))
    max_own_rows = harness.bound.max_steps
    next_id = 4
    while any(harness.clients.open_keys(request_id) for request_id in range(4)):
        harness.add(make_request(next_id, "xyz"[: random.randint(1, 3)], random.randint(1, 4)))
        next_id += 1
        step(harness)
        assert harness.scheduler.state.counters.num_steps <= max_own_rows * (1 + max_num_seqs * max_len)
    assert harness.scheduler.state.counters.num_steps < 3 * max_own_rows, "in practice the cost is small"


def test_the_bound_is_tight_for_one_sequence_that_decodes() -> None:
    """A prompt of one token and then one token a step take as many plans as there are tokens to compute."""
    harness = build_harness(make_request(1, "a", 9), max_preemptions=0)
    harness.run()
    assert harness.scheduler.state.counters.num_steps == harness.bound.max_steps == 9


# --- I14: preemptions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_preemptions", "num_usable_blocks", "sizes"),
    [
        (1, 10, [(2, 4), (1, 6), (2, 8)]),
        (2, 10, [(2, 4), (1, 6), (2, 8)]),
        (3, 11, [(2, 2), (2, 8), (2, 4), (2, 9)]),
    ],
)
def test_a_sequence_is_preempted_up_to_the_bound_and_no_more(
    max_preemptions: int, num_usable_blocks: int, sizes: list[tuple[int, int]]
) -> None:
    requests = [make_request(i, "ab"[:num_prompt], num_output) for i, (num_prompt, num_output) in enumerate(sizes)]
    harness = build_harness(*requests, num_usable_blocks=num_usable_blocks, max_preemptions=max_preemptions)
    last = list(unfinished_sequences(harness.scheduler.state))[-1]
    harness.run()
    assert last.num_preemptions == max_preemptions


def test_a_sequence_that_cannot_be_preempted_waits_for_all_blocks_it_can_need() -> None:
    first, second = make_request(1, "ab", 4), make_request(2, "xy", 4)
    harness = build_harness(first, second, num_usable_blocks=9, max_preemptions=0)
    step(harness)
    assert [s.request.request_id for s in harness.scheduler.state.batch.running] == [1], (
        "two sequences need ten blocks, and there are nine"
    )
    harness.run()
    assert harness.scheduler.state.counters.num_preemptions == 0


def test_a_forked_sample_has_no_guarantee_until_it_is_preempted() -> None:
    """With max_preemptions 0, a forked sample can still be preempted once: the exception to the bound."""
    harness = build_harness(make_request(1, "ab", 4, seeds=(1, 2)), num_usable_blocks=6, max_preemptions=0)
    step(harness)
    parent, child = harness.scheduler.state.batch.running
    assert (parent.is_guaranteed, child.is_guaranteed) == (True, False)
    harness.run()
    assert (parent.num_preemptions, child.num_preemptions) == (0, 1)


# --- I15: decodes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_long_prompt_does_not_hold_up_a_decode(max_in_flight: int) -> None:
    harness = build_harness(make_request(1, "a", 30), max_num_batched_tokens=5, max_in_flight=max_in_flight)
    step(harness)
    harness.add(make_request(2, "abcdefghijklmnopqrstuvwxyz", 1))
    num_tokens = [len(harness.clients.received[1, 0])]
    while harness.clients.open_keys(2):
        step(harness)
        num_tokens.append(len(harness.clients.received[1, 0]))
    assert num_tokens == list(range(1, 1 + len(num_tokens))), "a token a step"
    assert len(num_tokens) - 1 == 7, "26 prompt tokens, four a step beside the decode"


# --- I13: order -------------------------------------------------------------------------------------------------


def test_a_small_request_does_not_overtake_a_big_one() -> None:
    running, big, small = make_request(1, "abcdef", 4), make_request(2, "ghijkl", 1), make_request(3, "m", 1)
    harness = build_harness(running, big, small, num_usable_blocks=9)
    step(harness)
    assert harness.scheduler.state.cache.pool.num_free_blocks == 3, "room for the small one"
    assert admission_order(harness) == [1, 2, 3]


def test_fcfs_ignores_priorities() -> None:
    requests = [make_request(i, "ab", 3, priority=-i) for i in range(5)]
    assert admission_order(build_harness(*requests, max_num_seqs=1)) == [0, 1, 2, 3, 4]


def test_the_priority_policy_admits_urgent_requests_first_and_equal_ones_in_order_of_arrival() -> None:
    priorities = [2, 0, 1, 0, 2]
    requests = [make_request(i, "ab", 3, priority=priority) for i, priority in enumerate(priorities)]
    assert admission_order(build_harness(*requests, max_num_seqs=1, policy=PRIORITY)) == [1, 3, 2, 0, 4]


@pytest.mark.parametrize(("policy", "victim"), [(FCFS, 2), (PRIORITY, 1)])
def test_the_victim_is_the_last_in_order(policy: Policy, victim: int) -> None:
    """Under FCFS the latest is preempted; under priority the least urgent, even if it was first."""
    requests = [make_request(1, "ab", 6, priority=5), make_request(2, "xy", 6, priority=1)]
    harness = build_harness(*requests, num_usable_blocks=8, policy=policy)
    sequences = {s.request.request_id: s for s in unfinished_sequences(harness.scheduler.state)}
    harness.run()
    assert [i for i, sequence in sequences.items() if sequence.num_preemptions] == [victim]


def test_a_preempted_sequence_returns_before_later_arrivals() -> None:
    first, second, third = make_request(1, "ab", 6), make_request(2, "xy", 6), make_request(3, "m", 1)
    harness = build_harness(first, second, num_usable_blocks=8)
    step(harness)
    while not harness.scheduler.num_waiting:
        step(harness)
    harness.add(third)
    assert [s.request.request_id for s in harness.scheduler.state.waiting] == [2, 3]
    assert admission_order(harness) == [1, 2, 3]


# --- I16: requests that kill executors are found ----------------------------------------------------------------


POISON = 100


def runs_poison(harness: Harness) -> bool:
    return any(sequence.request.request_id == POISON for sequence in harness.scheduler.state.batch.running)


def decodes_poison(harness: Harness) -> bool:
    """Returns whether the newest plan decodes the poison request: it has rows of it, and none of known tokens."""
    if not harness.scheduler.num_in_flight:
        return False
    step = harness.scheduler.state.in_flight[-1]
    rows = (*step.sampled, *step.beams)
    return POISON in {sequence.request.request_id for sequence in rows} - {
        sequence.request.request_id for sequence in step.prefills
    }


def run_with_poison(harness: Harness, is_deadly: Callable[[Harness], bool] = runs_poison) -> int:
    """Loses the executor at each deadly plan, after the results of the plans before it; returns the number of losses.

    By default every plan with rows of the poison request is deadly.
    """
    num_deaths = 0
    while harness.scheduler.num_unfinished_requests or harness.in_flight:
        if harness.executor is None:
            harness.attach()
        while harness.schedule() is not None and not is_deadly(harness):
            pass
        if is_deadly(harness):
            while len(harness.in_flight) > 1:
                harness.commit()
            num_deaths += 1
            assert num_deaths < 100, "the poison request is not found"
            harness.lose()
        elif harness.in_flight:
            harness.commit()
    harness.assert_idle()
    return num_deaths


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("position", [0, 2, 4])
@pytest.mark.parametrize("max_losses", [2, 5])
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_poison_request_fails_alone(policy: Policy, position: int, max_losses: int, max_in_flight: int) -> None:
    requests = [make_request(i, "abcde"[: i + 1], 6, seeds=range(1 + i % 2)) for i in range(4)]
    requests.insert(position, make_request(POISON, "wxyz", 6))
    harness = build_harness(*requests, policy=policy, max_losses=max_losses, max_in_flight=max_in_flight)
    assert run_with_poison(harness) == max_losses + 1
    harness.clients.assert_served()
    assert harness.clients.ended.pop((POISON, 0)) is FinishReason.EXECUTORS_LOST
    assert set(harness.clients.ended.values()) == {FinishReason.LENGTH}, "all other requests get all their tokens"


@pytest.mark.parametrize("num_sequences", [2, 3])
def test_a_poison_request_of_several_samples_fails_as_a_whole(num_sequences: int) -> None:
    poison = make_request(POISON, "wxyz", 6, seeds=range(num_sequences))
    harness = build_harness(make_request(1), poison, make_request(2), max_in_flight=2)
    assert run_with_poison(harness) <= num_sequences * (harness.scheduler.state.limits.max_losses + 1)
    assert {harness.clients.ended.pop((POISON, index)) for index in range(num_sequences)} <= {
        FinishReason.EXECUTORS_LOST,
        FinishReason.CANCELLED,
    }
    assert set(harness.clients.ended.values()) == {FinishReason.LENGTH}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("position", [0, 2, 4])
@pytest.mark.parametrize("max_losses", [2, 5])
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_request_whose_decodes_end_executors_fails_alone(
    policy: Policy, position: int, max_losses: int, max_in_flight: int
) -> None:
    """Each executor computes its known tokens, which yields one more, and so do those of its neighbours."""
    requests = [make_request(i, "abcde"[: i + 1], 20, seeds=range(1 + i % 2)) for i in range(4)]
    requests.insert(position, make_request(POISON, "wxyz", 80))
    harness = build_harness(*requests, policy=policy, max_losses=max_losses, max_in_flight=max_in_flight)
    assert run_with_poison(harness, decodes_poison) == max_losses + 1
    assert harness.clients.ended.pop((POISON, 0)) is FinishReason.EXECUTORS_LOST
    assert set(harness.clients.ended.values()) == {FinishReason.LENGTH}, "all other requests get all their tokens"


@pytest.mark.parametrize(
    "poison",
    [
        make_request(POISON, "wxyz", 80, seeds=range(3)),
        make_request(POISON, "wxyz", 80, beam=BeamParams(2, 1)),
    ],
    ids=["samples", "beams"],
)
def test_samples_and_beams_whose_decodes_end_executors_fail(poison: Request) -> None:
    beams = make_request(2, "def", 20, beam=BeamParams(2, 1))
    harness = build_harness(
        make_request(1, "abc", 20), poison, beams, max_num_seqs=6, max_in_flight=2, num_usable_blocks=200
    )
    num_sequences = len(poison.seeds)
    assert run_with_poison(harness, decodes_poison) <= num_sequences * (harness.scheduler.state.limits.max_losses + 1)
    reasons = {harness.clients.ended.pop((POISON, index)) for index in range(num_sequences)}
    assert reasons <= {FinishReason.EXECUTORS_LOST, FinishReason.CANCELLED}
    assert set(harness.clients.ended.values()) == {FinishReason.LENGTH}


def test_a_beam_search_that_ends_executors_at_the_same_length_fails() -> None:
    """It begins with its prompt again each time, so only a beam that is longer than before is progress."""

    def has_long_poison(harness: Harness) -> bool:
        running = harness.scheduler.state.batch.running
        return any(sequence.request.request_id == POISON and sequence.num_tokens == 14 for sequence in running)

    poison = make_request(POISON, "wxyz", 80, beam=BeamParams(2, 1))
    harness = build_harness(make_request(1, "abc", 20), poison, make_request(2, "def", 20), num_usable_blocks=200)
    assert run_with_poison(harness, has_long_poison) == harness.scheduler.state.limits.max_losses + 1
    assert harness.clients.ended.pop((POISON, 0)) is FinishReason.EXECUTORS_LOST
    assert set(harness.clients.ended.values()) == {FinishReason.LENGTH}


def test_sequences_beside_a_poison_request_are_suspects_until_they_make_progress() -> None:
    harness = build_harness(make_request(1, "abc", 9), make_request(POISON, "xyz", 9), make_request(2, "def", 9))
    for _ in range(2):
        harness.schedule()
        assert harness.scheduler.num_waiting == 0
        harness.lose()
        harness.attach()
    assert all(sequence.is_suspect for sequence in unfinished_sequences(harness.scheduler.state))
    step(harness)
    (alone,) = harness.scheduler.state.batch.running
    assert (alone.request.request_id, alone.is_suspect) == (1, True)
    step(harness)
    assert not alone.is_suspect
    harness.add(make_request(3))
    step(harness)
    assert len(list(harness.scheduler.state.batch.running)) == 1, "the next suspect in the queue has to run alone, too"


def ends_with_executors_of(num_steps: int, max_tokens: int) -> set[FinishReason]:
    """Returns how requests end if no executor computes more than `num_steps` steps."""
    requests = [make_request(i, "abcde"[: i + 1], max_tokens, seeds=range(1 + i % 2)) for i in range(4)]
    harness = build_harness(*requests)
    while harness.scheduler.num_unfinished_requests:
        for _ in range(num_steps):
            step(harness)
        if harness.scheduler.num_unfinished_requests:
            harness.lose()
            harness.attach()
    return set(harness.clients.ended.values())


@pytest.mark.parametrize(("num_steps", "max_tokens"), [(2, 12), (3, 28), (5, 60)])
def test_executors_that_compute_the_known_tokens_and_a_decode_fail_no_request(num_steps: int, max_tokens: int) -> None:
    """A step computes 16 tokens, so all steps but one compute the known tokens of a request that runs alone."""
    assert ends_with_executors_of(num_steps, max_tokens) == {FinishReason.LENGTH}


def test_executors_that_compute_no_decode_fail_requests() -> None:
    """The price of the rule: each of them yields a token, and a request that needs a few more would end."""
    assert FinishReason.EXECUTORS_LOST in ends_with_executors_of(num_steps=1, max_tokens=12)
