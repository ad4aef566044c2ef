"""Log-probabilities against transformers, and beams against a search by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from executor.plans.plan import Fork, Logprobs
from executor.sampling import logprobs
from executor.sampling.logprobs import most_probable, rank_on_device, score
from kernels import cpu
from tests.support.executor import oracle
from tests.support.executor.conductor import Conductor, ints

TOLERANCE = 1e-4


@pytest.fixture
def source(checkpoint):
    return checkpoint("llama")


@pytest.fixture(scope="module", params=["reference", "auto"])
def runner(request, checkpoint, make_runner):
    return make_runner(checkpoint("llama").directory, kernels=request.param, num_blocks=300)


def entries(reported: Logprobs) -> list[tuple[int, float, int]]:
    return list(zip(reported.token_ids.tolist(), reported.values.tolist(), reported.ranks.tolist(), strict=True))


def assert_near(found: list[tuple[int, float, int]], expected: list[tuple[int, float, int]]) -> None:
    assert [(token, rank) for token, _, rank in found] == [(token, rank) for token, _, rank in expected]
    assert [value for _, value, _ in found] == pytest.approx([value for _, value, _ in expected], abs=TOLERANCE)


def expected_of(source, tokens: list[int], positions: range, num_likeliest: int) -> list[tuple[int, float, int]]:
    """Of the tokens at these positions."""
    logits = source.logits(tokens)
    return [one for at in positions for one in oracle.logprobs_of(logits[at - 1], tokens[at], num_likeliest)]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 1.5, "seed": 3},
        {"repetition_penalty": 1.5, "bias_token_ids": ints(3), "bias_values": np.array([30], np.float32)},
        {"eos_token_ids": ints(*range(300)), "min_total_tokens": 14},
    ],
)
def test_sampled_tokens(params, source, runner) -> None:
    """Whatever changes or bans logits: what is reported is the model's. Beside somebody who asks for nothing."""
    conductor = Conductor(runner)
    conductor.admit(source.prompt(3), 30, temperature=1.0)
    seat = conductor.admit(source.prompt(7), 9, num_logprobs=5, **params)
    while not seat.reason:
        conductor.step()
    found = [one for output in conductor.outputs for one in entries(output.reports.logprobs)]
    expected = expected_of(source, seat.tokens, range(7, 7 + len(seat.output)), 4)
    assert_near(found, expected)
    assert all(output.reports.prompt_logprobs is None for output in conductor.outputs)


def test_who_asks_gets_by_slot(source, runner) -> None:
    """Different numbers, forks, and nothing for those who do not ask."""
    conductor = Conductor(runner)
    conductor.admit(source.prompt(4), 9)
    parent = conductor.admit(source.prompt(5), 9, num_logprobs=3, temperature=2.0, seed=1)
    conductor.admit(source.prompt(6), 9)
    other = conductor.admit(source.prompt(7), 9, num_logprobs=1)
    output = conductor.step(forks=(Fork(parent.slot, 4, seed=2), Fork(parent.slot, 6, seed=3)))
    children = conductor.seats[-2:]
    expected = []
    for seat, num_likeliest in ((parent, 2), (other, 0), *((child, 2) for child in children)):
        at = seat.num_prompt_tokens
        expected += expected_of(source, seat.tokens, range(at, at + 1), num_likeliest)
    assert_near(entries(output.reports.logprobs), expected)
    assert len({seat.output[0] for seat in (parent, *children)}) > 1


def test_an_overrun_has_places_for_what_it_asked(source, runner) -> None:
    """It ended, and the plan did not know: whoever reads the result counts on its entries, alone and beside others."""
    conductor = Conductor(runner)
    ended = conductor.admit(source.prompt(4), 9, num_logprobs=2, stop_token_ids=ints(*range(300)))
    conductor.step()
    assert ended.reason
    alone = conductor.step()
    assert len(alone.reports.logprobs.token_ids) == 2
    other = conductor.admit(source.prompt(7), 9, num_logprobs=3)
    beside = conductor.step()
    expected = expected_of(source, other.tokens, range(7, 8), 2)
    assert_near(entries(beside.reports.logprobs)[2:], expected)
    conductor.retire(ended)
    assert len(conductor.step().reports.logprobs.token_ids) == 3


@pytest.mark.parametrize("max_chunk", [100, 5, 1])
def test_prompts(max_chunk, source, runner) -> None:
    """In one chunk or many, beside others; the row of the last prompt token speaks of output."""
    prompt = source.prompt(13)
    conductor = Conductor(runner)
    conductor.admit(source.prompt(3), 40)
    seat = conductor.admit(prompt, 3, max_chunk=max_chunk, num_prompt_logprobs=4, num_logprobs=2)
    while not seat.reason:
        conductor.step()
    reports = [output.reports for output in conductor.outputs]
    found = [one for one in reports if one.prompt_logprobs is not None]
    assert len(found) == -(-12 // max_chunk)
    assert_near(
        [one for report in found for one in entries(report.prompt_logprobs)],
        expected_of(source, prompt, range(1, 13), 3),
    )
    sampled = [one for report in reports if report.logprobs is not None for one in entries(report.logprobs)]
    assert_near(sampled, expected_of(source, seat.tokens, range(13, 16), 1))


def test_a_prompt_after_preemption_and_with_a_prefix(source, runner) -> None:
    """Output that comes back is no prompt; rows that are not computed are not reported."""
    prompt = source.prompt(9)
    conductor = Conductor(runner)
    first = conductor.admit(prompt, 1)
    conductor.step()
    tokens = [*prompt, *source.prompt(3)]
    seats = [
        conductor.admit(tokens, 1, num_prompt_logprobs=1, num_prompt_tokens=9),
        conductor.admit(tokens, 1, num_prompt_logprobs=2, num_prompt_tokens=9, prefix=first.block_table[:2]),
    ]
    assert conductor.step().reports.prompt_logprobs is not None
    found = entries(conductor.outputs[-1].reports.prompt_logprobs)
    assert_near(found, expected_of(source, prompt, range(1, 9), 0))
    assert seats[1].num_computed_tokens == 12


def test_two_prompts_at_once(source, runner) -> None:
    conductor = Conductor(runner)
    prompts = [source.prompt(length) for length in (6, 1, 4)]
    for number, prompt in enumerate(prompts):
        conductor.admit(prompt, 2, num_prompt_logprobs=number + 1)
    expected = [
        one
        for number, prompt in enumerate(prompts)
        for one in expected_of(source, prompt, range(1, len(prompt)), number)
    ]
    assert_near(entries(conductor.step().reports.prompt_logprobs), expected)
    assert conductor.step().reports.prompt_logprobs is None


@pytest.mark.parametrize(
    "params",
    [
        {},
        {
            "repetition_penalty": 1.4,
            "frequency_penalty": 0.5,
            "min_total_tokens": 10,
            "eos_token_ids": ints(*range(0, 300, 2)),
        },
    ],
)
def test_beams(params, source, runner) -> None:
    """Three beams, steered by hand: candidates of each, beside a sequence that samples."""
    width, prompt = 3, source.prompt(6)
    conductor = Conductor(runner)
    plain = conductor.admit(source.prompt(5), 12)
    beams = [conductor.admit(prompt, 40, num_candidates=2 * width, max_chunk=4, **params)]
    scores = {beams[0].slot: 0.0}
    branches: tuple = ()
    num_kept = 0
    for step in range(11):
        output = conductor.step(branches=branches)
        branches = ()
        if step == 0:
            assert output.reports.candidates is None, "the prompt's second chunk is to come"
            continue
        beams.sort(key=lambda beam: beam.slot)
        found = output.reports.candidates
        assert found.ranks is None
        assert len(found.token_ids) == len(beams) * 2 * width
        ranked = []
        for number, beam in enumerate(beams):
            rows = slice(number * 2 * width, (number + 1) * 2 * width)
            logits = oracle.changed_logits(source.logits(beam.tokens)[-1], beam.tokens, beam.params)
            expected = torch.log_softmax(logits.double(), dim=-1).topk(2 * width)
            assert found.token_ids[rows].tolist() == expected.indices.tolist()
            assert found.values[rows].tolist() == pytest.approx(expected.values.tolist(), abs=TOLERANCE)
            ranked += [
                (scores[beam.slot] + value, beam, token)
                for token, value in zip(expected.indices.tolist(), expected.values.tolist(), strict=True)
            ]
        ranked.sort(key=lambda one: -one[0])
        while len(beams) < width:
            beams.append(conductor.beam_of(beams[0]))
        branches = tuple((beam, parent, token) for beam, (_, parent, token) in zip(beams, ranked, strict=False))
        num_kept += sum(beam is parent for beam, parent, _ in branches)
        scores = {beam.slot: value for beam, (value, _, _) in zip(beams, ranked, strict=False)}
    assert plain.output[:10] == source.greedy(source.prompt(5), 10)
    assert 0 < num_kept < 3 * 10, "beams went on in their own slots and in others'"


def test_a_beam_that_nobody_continues_rests(source, runner) -> None:
    conductor = Conductor(runner)
    conductor.admit(source.prompt(6), 9, num_candidates=4)
    assert conductor.step().reports.candidates is not None
    for _ in range(2):
        output = conductor.step()
        assert output.reports.candidates is None
        assert len(output.token_ids) == 0


@pytest.mark.parametrize("count", [0, 1, 7, 90])
def test_a_device_ranks_as_the_cpu_does(count) -> None:
    logits = (torch.randn(12, 90, generator=torch.Generator().manual_seed(2)) * 2).round()
    token_ids = np.arange(12, dtype=np.int32)
    for given in (token_ids, None):
        found, expected = rank_on_device(logits, given, count), cpu.rank(logits, given, count)
        assert found[0].tolist() == expected[0].tolist()
        assert found[1] == pytest.approx(expected[1], rel=1e-6)
        assert found[2].tolist() == expected[2].tolist()


def test_ranks_among_equals_and_pieces(monkeypatch) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0], [0.0, -0.0, 0.0, -torch.inf, -0.0]])
    for size in (100, 1):
        monkeypatch.setattr(logprobs, "_CHUNK", size)
        found = score(logits, ints(4, 1), ints(4, 6))
        assert found.token_ids.tolist() == [4, 1, 2, 4, 1, 0, 1, 2, 4, 3]
        assert found.ranks.tolist() == [3, 1, 2, 3, 2, 1, 2, 3, 4, 5]
        assert found.values[4:9].tolist() == pytest.approx([np.log(0.25)] * 5)
        assert found.values[9] == -np.inf
        best = most_probable(logits, ints(2, 1))
        assert (best.token_ids.tolist(), best.ranks) == ([1, 2, 0], None)
