"""Log-probabilities against transformers, and beams against a search in the test."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from executor.plans.plan import Fork, Logprobs
from executor.sampling import logprobs
from executor.sampling.logprobs import most_probable, rank_on_device, score
from kernels import cpu
from tests.support.executor import oracle
from tests.support.executor.plan_driver import PlanDriver, ints

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


def expected_of(source, tokens: list[int], positions: range, num_others: int) -> list[tuple[int, float, int]]:
    """Returns the expected entries of the tokens at these positions."""
    logits = source.logits(tokens)
    return [one for at in positions for one in oracle.logprobs_of(logits[at - 1], tokens[at], num_others)]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 1.5, "seed": 3},
        {"repetition_penalty": 1.5, "bias_token_ids": ints(3), "bias_values": np.array([30], np.float32)},
        {"eos_token_ids": ints(*range(300)), "min_total_tokens": 14},
    ],
)
def test_logprobs_of_sampled_tokens_equal_transformers(params, source, runner) -> None:
    """Reports use the model's own logits, even if logits are changed or banned; another sequence has no reports."""
    driver = PlanDriver(runner)
    driver.admit(source.prompt(3), 30, temperature=1.0)
    sequence = driver.admit(source.prompt(7), 9, num_logprobs=5, **params)
    while not sequence.reason:
        driver.step()
    found = [one for output in driver.outputs for one in entries(output.reports.logprobs)]
    expected = expected_of(source, sequence.tokens, range(7, 7 + len(sequence.output)), 4)
    assert_near(found, expected)
    assert all(output.reports.prompt_logprobs is None for output in driver.outputs)


def test_reports_are_in_the_order_of_slots(source, runner) -> None:
    """Covers different numbers of entries, forks, and sequences without reports."""
    driver = PlanDriver(runner)
    driver.admit(source.prompt(4), 9)
    parent = driver.admit(source.prompt(5), 9, num_logprobs=3, temperature=2.0, seed=1)
    driver.admit(source.prompt(6), 9)
    other = driver.admit(source.prompt(7), 9, num_logprobs=1)
    output = driver.step(forks=(Fork(parent.slot, 4, seed=2), Fork(parent.slot, 6, seed=3)))
    children = driver.sequences[-2:]
    expected = []
    for sequence, num_others in ((parent, 2), (other, 0), *((child, 2) for child in children)):
        at = sequence.num_prompt_tokens
        expected += expected_of(source, sequence.tokens, range(at, at + 1), num_others)
    assert_near(entries(output.reports.logprobs), expected)
    assert len({sequence.output[0] for sequence in (parent, *children)}) > 1


def test_an_overrun_slot_keeps_its_entries(source, runner) -> None:
    """The plan did not know of the end, so the result still has the slot's entries, with or without others."""
    driver = PlanDriver(runner)
    ended = driver.admit(source.prompt(4), 9, num_logprobs=2, stop_token_ids=ints(*range(300)))
    driver.step()
    assert ended.reason
    alone = driver.step()
    assert len(alone.reports.logprobs.token_ids) == 2
    other = driver.admit(source.prompt(7), 9, num_logprobs=3)
    beside = driver.step()
    expected = expected_of(source, other.tokens, range(7, 8), 2)
    assert_near(entries(beside.reports.logprobs)[2:], expected)
    driver.retire(ended)
    assert len(driver.step().reports.logprobs.token_ids) == 3


@pytest.mark.parametrize("max_chunk", [100, 5, 1])
def test_logprobs_of_prompts_equal_transformers(max_chunk, source, runner) -> None:
    """Covers one chunk and many, together with other sequences. The last prompt token predicts output, not prompt."""
    prompt = source.prompt(13)
    driver = PlanDriver(runner)
    driver.admit(source.prompt(3), 40)
    sequence = driver.admit(prompt, 3, max_chunk=max_chunk, num_prompt_logprobs=4, num_logprobs=2)
    while not sequence.reason:
        driver.step()
    reports = [output.reports for output in driver.outputs]
    found = [one for one in reports if one.prompt_logprobs is not None]
    assert len(found) == -(-12 // max_chunk)
    assert_near(
        [one for report in found for one in entries(report.prompt_logprobs)],
        expected_of(source, prompt, range(1, 13), 3),
    )
    sampled = [one for report in reports if report.logprobs is not None for one in entries(report.logprobs)]
    assert_near(sampled, expected_of(source, sequence.tokens, range(13, 16), 1))


def test_only_computed_prompt_rows_are_reported(source, runner) -> None:
    """Output that is admitted again is not reported as prompt, and neither are rows that are not computed."""
    prompt = source.prompt(9)
    driver = PlanDriver(runner)
    first = driver.admit(prompt, 1)
    driver.step()
    tokens = [*prompt, *source.prompt(3)]
    sequences = [
        driver.admit(tokens, 1, num_prompt_logprobs=1, num_prompt_tokens=9),
        driver.admit(tokens, 1, num_prompt_logprobs=2, num_prompt_tokens=9, prefix=first.block_table[:2]),
    ]
    assert driver.step().reports.prompt_logprobs is not None
    found = entries(driver.outputs[-1].reports.prompt_logprobs)
    assert_near(found, expected_of(source, prompt, range(1, 9), 0))
    assert sequences[1].num_computed_tokens == 12


def test_logprobs_of_several_prompts_equal_transformers(source, runner) -> None:
    driver = PlanDriver(runner)
    prompts = [source.prompt(length) for length in (6, 1, 4)]
    for number, prompt in enumerate(prompts):
        driver.admit(prompt, 2, num_prompt_logprobs=number + 1)
    expected = [
        one
        for number, prompt in enumerate(prompts)
        for one in expected_of(source, prompt, range(1, len(prompt)), number)
    ]
    assert_near(entries(driver.step().reports.prompt_logprobs), expected)
    assert driver.step().reports.prompt_logprobs is None


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
def test_candidates_of_beams_lead_to_the_expected_search(params, source, runner) -> None:
    """The test chooses the branches of three beams from their candidates, together with a sequence that samples."""
    width, prompt = 3, source.prompt(6)
    driver = PlanDriver(runner)
    plain = driver.admit(source.prompt(5), 12)
    beams = [driver.admit(prompt, 40, num_candidates=2 * width, max_chunk=4, **params)]
    scores = {beams[0].slot: 0.0}
    branches: tuple = ()
    num_kept = 0
    for step in range(11):
        output = driver.step(branches=branches)
        branches = ()
        if step == 0:
            assert output.reports.candidates is None, "the prompt's second chunk is still to be computed"
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
            beams.append(driver.add_beam(beams[0]))
        branches = tuple((beam, parent, token) for beam, (_, parent, token) in zip(beams, ranked, strict=False))
        num_kept += sum(beam is parent for beam, parent, _ in branches)
        scores = {beam.slot: value for beam, (value, _, _) in zip(beams, ranked, strict=False)}
    assert plain.output[:10] == source.greedy(source.prompt(5), 10)
    assert 0 < num_kept < 3 * 10, "beams continued in their own slots and in others'"


def test_a_beam_without_a_branch_computes_nothing(source, runner) -> None:
    driver = PlanDriver(runner)
    driver.admit(source.prompt(6), 9, num_candidates=4)
    assert driver.step().reports.candidates is not None
    for _ in range(2):
        output = driver.step()
        assert output.reports.candidates is None
        assert len(output.token_ids) == 0


@pytest.mark.parametrize("count", [0, 1, 7, 90])
def test_ranks_on_a_device_equal_those_on_the_cpu(count) -> None:
    logits = (torch.randn(12, 90, generator=torch.Generator().manual_seed(2)) * 2).round()
    token_ids = np.arange(12, dtype=np.int32)
    for given in (token_ids, None):
        found, expected = rank_on_device(logits, given, count), cpu.rank(logits, given, count)
        assert found[0].tolist() == expected[0].tolist()
        assert found[1] == pytest.approx(expected[1], rel=1e-6)
        assert found[2].tolist() == expected[2].tolist()


def test_ranks_are_correct_among_equal_logits_and_in_pieces(monkeypatch) -> None:
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
