"""Requests that are resumed: their clients have received a part of the output from another scheduler."""

from dataclasses import replace

import pytest

from scheduler.core import BeamParams, FinishReason, QueueFull, ReceivedOutput, Request, SchedulerLimits
from scheduler.core.tenants.account import GENERATED_TOKEN_COST, PROMPT_TOKEN_COST
from tests.support.core.harness import Harness
from tests.support.core.letter_tokens import VOCAB_SIZE, make_request
from tests.support.core.resumptions import resumption
from tests.support.core.small_harness import build_harness

SAMPLES = make_request(1, "abcde", 6, seeds=(3, 1, 2))


def undisturbed(request: Request) -> Harness:
    harness = build_harness(request)
    harness.run()
    return harness


def outputs_after(harness: Harness, *lengths: int) -> tuple[ReceivedOutput, ...]:
    """Returns the first tokens of each sequence of request 1."""
    received = harness.clients.received
    return tuple(ReceivedOutput(tuple(received[1, index][:length])) for index, length in enumerate(lengths))


@pytest.mark.parametrize("lengths", [(1, 0, 0), (0, 0, 1), (1, 1, 0), (5, 0, 3), (5, 5, 5)])
@pytest.mark.parametrize("max_num_seqs", [3, 4])
def test_samples_continue_alone_with_the_tokens_that_forks_would_get(lengths: list[int], max_num_seqs: int) -> None:
    first = undisturbed(SAMPLES)
    harness = build_harness(replace(SAMPLES, outputs=outputs_after(first, *lengths)), max_num_seqs=max_num_seqs)
    harness.run()
    assert harness.clients.received == first.clients.received
    assert harness.clients.ended == first.clients.ended


def test_finished_samples_take_no_slot_and_get_no_event() -> None:
    first = undisturbed(SAMPLES)
    outputs = (ReceivedOutput(is_finished=True), *outputs_after(first, 0, 2, 2)[1:])
    harness = build_harness(replace(SAMPLES, outputs=outputs))
    harness.schedule()
    harness.commit()
    harness.schedule()  # sample 2 has waited for the blocks of the prompt that sample 1 has computed
    assert [sequence.index for sequence in harness.scheduler.state.batch.running] == [1, 2]
    assert harness.scheduler.state.batch.num_free_slots == 2
    harness.run()
    assert harness.clients.received[1, 0] == []
    assert harness.clients.received[1, 1] == first.clients.received[1, 1]
    assert harness.clients.num_cached_tokens.keys() == {1}, "the request starts with its first unfinished sample"


def test_given_tokens_are_charged_as_a_prompt() -> None:
    request = make_request(1, "abcdefgh", 6)
    received = outputs_after(undisturbed(request), 4)
    harness = build_harness(replace(request, outputs=received))
    harness.run()
    cost = PROMPT_TOKEN_COST * (8 + 4) + GENERATED_TOKEN_COST * 2
    assert [account.cost for account in harness.scheduler.state.accounts] == [cost]


def test_given_tokens_count_at_the_bounds_of_the_queue() -> None:
    limits = SchedulerLimits(4, 16, 100, max_waiting_prompt_tokens=40)
    harness = Harness(limits, num_blocks=100, block_size=1, vocab_size=VOCAB_SIZE)
    harness.add(make_request(1, "abc"))
    request = make_request(2, "abc", 50, seeds=(1, 2))
    full = replace(request, outputs=(ReceivedOutput((1,) * 16), ReceivedOutput((1,) * 16)))
    with pytest.raises(QueueFull, match="3 prompt tokens are waiting"):
        harness.scheduler.add(full)
    assert full.num_given_tokens == 2 * 3 + 32
    harness.scheduler.add(replace(full, outputs=(ReceivedOutput((1,) * 16), ReceivedOutput(is_finished=True))))
    assert harness.scheduler.state.waiting.num_prompt_tokens == 3 + 19


def test_a_resumed_request_finds_its_own_output_in_the_prefix_cache() -> None:
    harness = build_harness(make_request(1, "abcde", 6))
    harness.run()
    received = outputs_after(harness, 4)
    harness.add(replace(make_request(2, "abcde", 6), outputs=received))
    harness.run()
    assert harness.clients.num_cached_tokens == {1: 0, 2: 5 + 4 - 1}
    counters = harness.scheduler.state.counters
    assert (counters.num_prefix_queried_tokens, counters.num_prefix_hit_tokens) == (5 + 9, 8)


def test_log_probabilities_of_the_prompt_go_on_where_they_ended() -> None:
    request = make_request(1, "abcdefgh" * 4, 2)
    request = replace(request, params=replace(request.params, num_prompt_logprobs=2, num_logprobs=1))
    for num_known in (0, 1, 20, 30, 31):
        harness = build_harness(replace(request, num_prompt_reported=num_known))
        harness.run()
        assert harness.clients.num_prompt_logprobs == {1: 31}
        assert (harness.coverage.num_prompt_logprobs == 0) == (num_known == 31)


def test_a_beam_search_starts_again() -> None:
    request = make_request(1, "abc", 5, beam=BeamParams(3, 2))
    harness = build_harness(request)
    for _ in range(3):
        harness.schedule()
        harness.commit()
    rest = resumption(harness.clients, 1)
    assert rest == replace(request, is_resumed=True)
    harness.cancel(1)
    harness.add(replace(request, request_id=2))
    harness.run()
    assert harness.clients.ended[2, 0] is FinishReason.LENGTH


def test_a_resumed_sequence_that_waits_is_ended_by_a_smaller_pool() -> None:
    request = make_request(1, "abc", 97, seeds=(1, 2), is_open_ended=True)
    received = outputs_after(undisturbed(request), 30, 10)
    harness = build_harness()
    harness.lose()
    harness.add(replace(request, outputs=received))
    harness.attach(num_blocks=1 + 20)
    assert harness.clients.ended == {(1, 0): FinishReason.LENGTH}
    harness.run()
    assert harness.clients.ended == {(1, 0): FinishReason.LENGTH, (1, 1): FinishReason.LENGTH}
