"""I25: with decodes, a step takes as many prompt tokens as its target allows, by what steps have cost."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.core import Request, SchedulerLimits, StepCosts
from tests.support.core.harness import Harness
from tests.support.core.letter_tokens import VOCAB_SIZE, make_request

COSTS = StepCosts(step_s=0.2, decode_s=0.1, token_s=0.01)
LIMITS = SchedulerLimits(
    8, 100, 400, max_in_flight=1, watermark_ratio=0, target_inter_token_latency_s=1.0, min_prompt_tokens=4
)
LONG = "a" * 300
seconds = st.just(0.0) | st.floats(1e-9, 1)


def build(*requests: Request, limits: SchedulerLimits = LIMITS, costs: StepCosts = COSTS) -> Harness:
    harness = Harness(limits, num_blocks=2001, block_size=1, vocab_size=VOCAB_SIZE)
    harness.attach()
    harness.scheduler.set_costs(costs)
    for request in requests:
        harness.add(request)
    return harness


def reporting(request: Request) -> Request:
    return replace(request, params=replace(request.params, num_prompt_logprobs=2))


def prompt_tokens(harness: Harness) -> dict[int, int]:
    """Plans and commits a step; returns the prompt tokens that it computes, by request id."""
    assert harness.schedule() is not None
    found = {s.request.request_id: number for s, number in harness.scheduler.state.in_flight[-1].prefills.items()}
    harness.commit()
    return found


def with_a_decode(**options: object) -> Harness:
    harness = build(make_request(1, "ab", 300), **options)  # type: ignore[arg-type]
    prompt_tokens(harness)
    return harness


@given(seconds, seconds, seconds, st.just(0.0) | st.floats(1e-6, 10), st.integers(0, 20_000), st.booleans())
@settings(max_examples=500, deadline=None, derandomize=True, database=None)
def test_the_tokens_within_a_time_are_the_most_that_take_no_longer(
    token_s: float, pair_s: float, report_s: float, time_s: float, num_before: int, is_reported: bool
) -> None:
    costs = StepCosts(token_s=token_s, pair_s=pair_s, report_s=report_s)
    number = costs.num_tokens_within(time_s, num_before, is_reported=is_reported)
    if number == 1 << 30:
        return
    assert costs.prompt_s(number, num_before, is_reported=is_reported) <= time_s * (1 + 1e-9)
    assert costs.prompt_s(number + 1, num_before, is_reported=is_reported) >= time_s * (1 - 1e-9)


def test_no_time_is_left_after_slow_decodes_and_any_time_if_nothing_is_known() -> None:
    assert COSTS.num_tokens_within(0.0, 0, is_reported=False) == 0
    assert COSTS.num_tokens_within(-1.0, 0, is_reported=False) == 0
    assert COSTS.num_tokens_within(inf, 0, is_reported=False) > LIMITS.max_num_batched_tokens
    assert StepCosts().num_tokens_within(1e-9, 0, is_reported=True) > LIMITS.max_num_batched_tokens


def test_without_decodes_a_step_takes_the_whole_budget() -> None:
    assert prompt_tokens(build(make_request(1, LONG, 1))) == {1: 100}


def test_beside_decodes_a_step_takes_what_the_target_leaves() -> None:
    harness = with_a_decode()
    harness.add(make_request(2, LONG, 1))
    assert prompt_tokens(harness) == {2: 70}
    harness.cancel(1)
    assert prompt_tokens(harness) == {2: 100}
    harness.run()


def test_every_decode_and_its_context_take_time_from_prompts() -> None:
    costs = replace(COSTS, decode_s=0.05, decode_pair_s=0.003)
    harness = build(*[make_request(i, "abc"[i] * 10, 300) for i in range(3)], costs=costs)
    prompt_tokens(harness)
    harness.add(make_request(9, LONG, 1))
    assert prompt_tokens(harness) == {9: 55}, "1.0 s - 0.2 s - 3 of 0.05 s and of 11 pairs"


def test_later_tokens_of_a_long_prompt_are_fewer_to_a_step() -> None:
    harness = with_a_decode(costs=replace(COSTS, pair_s=0.0001))
    harness.add(make_request(2, LONG, 1))
    numbers = [prompt_tokens(harness)[2] for _ in range(4)]
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[0] == 54
    assert numbers[-1] < 40
    harness.run()


@pytest.mark.parametrize(("decode_s", "num_tokens"), [(0.205, 59), (0.405, 60), (0.605, 80), (1.8, 99)])
def test_prompts_take_as_long_as_decodes_that_take_more_than_half_of_the_target(
    decode_s: float, num_tokens: int
) -> None:
    harness = with_a_decode(costs=replace(COSTS, decode_s=decode_s))
    harness.add(make_request(2, LONG, 1))
    assert prompt_tokens(harness) == {2: num_tokens}


def test_prompts_progress_if_each_of_their_tokens_takes_longer_than_there_is() -> None:
    harness = with_a_decode()
    harness.scheduler.set_costs(replace(COSTS, token_s=9.0))
    harness.add(make_request(2, LONG, 1))
    harness.add(make_request(3, "xyz", 1))
    assert prompt_tokens(harness) == {2: 1}
    harness.run()


def test_the_least_number_of_prompt_tokens_takes_at_most_one_more_target() -> None:
    """Each token is as slow as one at the end of a prompt of 100,000 tokens: a step of all four would take 2.9 s."""
    harness = with_a_decode(costs=replace(COSTS, token_s=0.65))
    harness.add(make_request(2, LONG, 1))
    assert prompt_tokens(harness) == {2: 2}
    harness.add(make_request(3, "xyz", 1))
    assert prompt_tokens(harness) == {2: 2, 3: 1}, "the prompt that arrived later does not wait"
    harness.run()


def test_prompts_share_the_least_number_of_tokens_if_it_takes_less_than_one_more_target() -> None:
    harness = with_a_decode(costs=replace(COSTS, token_s=0.42))
    harness.add(make_request(2, LONG, 1))
    assert prompt_tokens(harness) == {2: 4}
    harness.add(make_request(3, "xyz", 1))
    assert prompt_tokens(harness) == {2: 2, 3: 2}, "half is for prompts that arrived later"
    assert prompt_tokens(harness) == {2: 3, 3: 1}, "which do not wait until the long prompt is computed"
    harness.run()


@pytest.mark.parametrize(("token_s", "num_tokens"), [(0.05, 100), (0.25, 40), (3.0, 3), (9.0, 1)])
def test_without_decodes_a_step_takes_at_most_ten_targets(token_s: float, num_tokens: int) -> None:
    """At the end of a long prompt a step of `max_num_batched_tokens` takes seconds, for which new requests wait."""
    assert prompt_tokens(build(make_request(1, LONG, 1), costs=replace(COSTS, token_s=token_s))) == {1: num_tokens}


def test_short_prompts_pass_a_long_one_within_the_target() -> None:
    harness = with_a_decode()
    harness.add(make_request(2, LONG, 1))
    prompt_tokens(harness)
    harness.add(make_request(3, "bcdefghij", 1))
    assert prompt_tokens(harness) == {2: 60, 3: 9}, "each half is rounded down"


@pytest.mark.parametrize("costs", [StepCosts(), replace(COSTS, token_s=0.0)])
def test_what_is_not_known_bounds_nothing(costs: StepCosts) -> None:
    harness = with_a_decode(costs=costs)
    harness.add(make_request(2, LONG, 1))
    assert prompt_tokens(harness) == {2: 99}


def test_without_a_target_costs_bound_nothing() -> None:
    harness = with_a_decode(limits=replace(LIMITS, target_inter_token_latency_s=inf))
    harness.add(make_request(2, LONG, 1))
    assert prompt_tokens(harness) == {2: 99}


def test_a_reported_prompt_token_counts_as_many_as_take_its_time() -> None:
    """Without decodes, too: such a step takes no longer than one of plain prompt tokens."""
    harness = build(reporting(make_request(1, LONG, 1)), costs=replace(COSTS, report_s=0.09))
    assert prompt_tokens(harness) == {1: 10}
    harness.add(make_request(2, "b" * 300, 1))
    assert prompt_tokens(harness) == {1: 5, 2: 50}
    harness.run()


def test_beside_decodes_a_reported_prompt_token_takes_its_time() -> None:
    harness = with_a_decode(costs=replace(COSTS, report_s=0.09))
    harness.add(reporting(make_request(2, LONG, 1)))
    assert prompt_tokens(harness) == {2: 7}
    harness.run()


@pytest.mark.parametrize(("name", "value"), [("target_inter_token_latency_s", 0), ("min_prompt_tokens", 0)])
def test_limits_are_positive(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=name):
        replace(LIMITS, **{name: value})
