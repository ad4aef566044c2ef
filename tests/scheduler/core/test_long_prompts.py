"""The second half of I15: a prompt that takes several steps leaves room for new requests in each step."""

from collections import Counter

from scheduler.core import Request
from tests.support.core.harness import Harness
from tests.support.core.letter_tokens import make_request
from tests.support.core.small_harness import build_harness

BUDGET = 16
LONG = "a" * 90


def chunks(harness: Harness) -> dict[int, int]:
    """Plans and commits a step; returns the prompt tokens that it computed, by request id."""
    assert harness.schedule() is not None
    found = Counter[int]()
    for sequence, num_tokens in harness.scheduler.state.in_flight[-1].prefills.items():
        found[sequence.request.request_id] += num_tokens
    harness.commit()
    return dict(found)


def build(*requests: Request, num_usable_blocks: int = 400) -> Harness:
    return build_harness(*requests, max_num_batched_tokens=BUDGET, num_usable_blocks=num_usable_blocks)


def test_a_long_prompt_alone_gets_the_whole_budget() -> None:
    harness = build(make_request(1, LONG, 1))
    assert [chunks(harness) for _ in range(6)] == [{1: 16}] * 5 + [{1: 10}]


def test_short_prompts_do_not_wait_for_a_long_one() -> None:
    harness = build(make_request(1, LONG, 1))
    chunks(harness)
    for request_id, prompt in enumerate(["bcd", "cde", "def", "efg", "fgh"], start=2):
        harness.add(make_request(request_id, prompt, 1))
        assert chunks(harness)[request_id] == 3, "it is admitted by the next plan"
    harness.run()


def test_a_long_prompt_gets_the_budget_that_short_ones_leave_and_at_least_half() -> None:
    harness = build(make_request(1, LONG, 1))
    chunks(harness)
    harness.add(make_request(2, "xyz", 1))
    assert chunks(harness) == {1: 13, 2: 3}
    harness.add(make_request(3, "b" * 30, 1))
    assert chunks(harness) == {1: 8, 3: 8}
    assert chunks(harness) == {1: 8, 3: 8}, "the second one has less left, and does not wait for the first"
    harness.add(make_request(4, "uvw", 1))
    assert chunks(harness) == {1: 8, 3: 5, 4: 3}, "a short prompt behind both does not wait either"
    harness.run()
    assert harness.scheduler.state.counters.num_steps == -(-(90 + 3 + 30 + 3) // BUDGET), (
        "all steps but the last are full"
    )


def test_a_prompt_that_has_more_left_than_the_first_waits_for_it() -> None:
    harness = build(make_request(1, LONG, 1))
    chunks(harness)
    harness.add(make_request(2, "b" * 98, 1))
    assert chunks(harness) == {1: 8, 2: 8}, "its length counts only once it is admitted"
    assert chunks(harness) == {1: 16}
    harness.run()


def test_a_long_prompt_takes_at_most_twice_the_steps_whatever_arrives() -> None:
    harness = build(make_request(1, LONG, 1))
    next_id = 2
    while harness.clients.open_keys(1):
        harness.add(make_request(next_id, "bcdefghijklm"[next_id % 12] * 50, 1))
        next_id += 1
        chunks(harness)
    assert harness.scheduler.state.counters.num_steps <= 2 * -(-90 // BUDGET)


def test_prompts_share_the_budget_that_decodes_leave() -> None:
    harness = build(make_request(1, "ab", 30), make_request(2, "cd", 30))
    chunks(harness)
    harness.add(make_request(3, LONG, 1))
    assert chunks(harness) == {3: 14}
    harness.add(make_request(4, "x" * 20, 1))
    assert chunks(harness) == {3: 7, 4: 7}
    harness.run()


def test_blocks_that_a_long_prompt_still_needs_are_not_given_away() -> None:
    """Prompts of 90 and 20 tokens do not fit 100 blocks: the second waits, and neither is preempted."""
    harness = build(make_request(1, LONG, 1), num_usable_blocks=100)
    chunks(harness)
    harness.add(make_request(2, "x" * 20, 1))
    for _ in range(4):
        assert set(chunks(harness)) == {1}
    harness.run()
    assert harness.scheduler.state.counters.num_preemptions == 0
