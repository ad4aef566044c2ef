"""Sequences with grammars: their texts, their neighbours, and what happens to them in the persistent batch."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from llguidance import LLMatcher

from executor.grammars.followed import follow
from executor.grammars.turn import Busy
from executor.plans.plan import EndReason, StepOutput
from tests.support.executor.letters import EOS, OTHER_EOS, TEXTS, text_of
from tests.support.executor.plan_driver import PlanDriver, ints, run_alone

PATTERN = "(ab|c)(a|bb){3,9}c?"
EOS_IDS = ints(EOS)
SAMPLED = {"temperature": 1.5, "seed": 7, "top_p": 0.95}
PENALISED = {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "num_logprobs": 2}


def following(pattern: str = PATTERN, **params: object) -> dict[str, object]:
    return {"grammar": LLMatcher.grammar_from_regex(pattern), "eos_token_ids": EOS_IDS, **params}


@pytest.mark.parametrize("params", [{}, SAMPLED, PENALISED, SAMPLED | PENALISED], ids=str)
def test_a_text_of_the_grammar_ends_with_eos(params, runner, lettered) -> None:
    for seed in range(5):
        sequence = run_alone(runner, lettered.prompt(6, seed=seed), **following(**params))
        assert sequence.reason is EndReason.EOS
        assert sequence.output[-1] == EOS
        assert re.fullmatch(PATTERN, text_of(sequence.output))


def test_each_eos_id_of_the_request_ends_a_text_and_no_other_does(runner, lettered) -> None:
    ends = set()
    for seed in range(20):
        params = {"temperature": 3.0, "seed": seed, "eos_token_ids": ints(OTHER_EOS, EOS)}
        sequence = run_alone(runner, lettered.prompt(4), **following("a{1,6}", **params))
        assert sequence.reason is EndReason.EOS
        ends.add(sequence.output[-1])
    assert ends == {EOS, OTHER_EOS}
    sequence = run_alone(runner, lettered.prompt(4), **following("a{1,6}", eos_token_ids=ints(OTHER_EOS)))
    assert sequence.output[-1] == OTHER_EOS
    sequence = run_alone(runner, lettered.prompt(4), **following("a{1,6}", eos_token_ids=ints()))
    assert sequence.reason is EndReason.GRAMMAR, "the text is complete, and no token can come next"


def test_length_and_stop_ids_end_the_beginning_of_a_text(runner, lettered) -> None:
    driver = PlanDriver(runner)
    short = driver.admit(lettered.prompt(5), 3, **following("a{50}b"))
    stopped = driver.admit(lettered.prompt(5), 40, **following("c{4,5}b{3}", stop_token_ids=ints(3, 11)))
    driver.run()
    assert (short.reason, stopped.reason) == (EndReason.LENGTH, EndReason.STOP)
    assert re.fullmatch("a+", text_of(short.output))
    assert re.fullmatch("c{4,5}bb?", text_of(stopped.output))


@pytest.mark.parametrize("params", [{}, SAMPLED, SAMPLED | PENALISED], ids=str)
def test_a_sequence_that_is_admitted_again_goes_on_as_before(params, runner, lettered) -> None:
    prompt = lettered.prompt(9)
    whole = run_alone(runner, prompt, **following(**params))
    for cut in range(1, len(whole.output)):
        tokens = whole.tokens[: len(prompt) + cut]
        again = run_alone(runner, tokens, **following(num_prompt_tokens=len(prompt), **params))
        assert again.tokens == whole.tokens
        assert again.reason is EndReason.EOS


@pytest.mark.parametrize("output", [[2, 2, 2], [EOS], [4, EOS, 2], [200, 201]])
def test_an_output_that_the_grammar_forbids_ends_its_own_sequence_only(output, runner, lettered) -> None:
    prompt = lettered.prompt(6)
    beside = run_alone(runner, prompt, **following()).output
    driver = PlanDriver(runner)
    hostile = driver.admit([*prompt, *output], 20, **following("aab", num_prompt_tokens=len(prompt)))
    honest = driver.admit(prompt, 40, **following())
    driver.run()
    assert hostile.reason is EndReason.GRAMMAR
    assert len(hostile.output) == 1
    assert honest.output == beside


@pytest.mark.parametrize("grammar", ["x", "{}", LLMatcher.grammar_from_regex("d"), LLMatcher.grammar_from_lark("(")])
def test_a_grammar_that_cannot_be_followed_ends_its_own_sequence_only(grammar, runner, lettered) -> None:
    prompt = lettered.prompt(6)
    beside = run_alone(runner, prompt, **following()).output
    driver = PlanDriver(runner)
    hostile = [driver.admit(prompt, 20, grammar=grammar, eos_token_ids=EOS_IDS, **each) for each in ({}, SAMPLED)]
    honest = driver.admit(prompt, 40, **following())
    driver.run()
    assert [sequence.reason for sequence in hostile] == [EndReason.GRAMMAR] * 2
    assert honest.output == beside


def test_allowed_tokens_that_contradict_the_grammar_end_the_sequence(runner, lettered) -> None:
    """The scheduler refuses such a request. No token has a finite logit."""
    for params in ({}, SAMPLED):
        sequence = run_alone(runner, lettered.prompt(6), **following(allowed_token_ids=ints(EOS, 100), **params))
        assert sequence.reason is EndReason.GRAMMAR


def test_neighbours_keep_their_tokens_and_log_probabilities(lettered, make_runner) -> None:
    runner = make_runner(lettered.directory, kernels="auto", max_num_seqs=40, num_blocks=900)
    kinds = [{"num_logprobs": 4}, {"num_logprobs": 4, **SAMPLED}, {"num_logprobs": 4, "repetition_penalty": 1.3}]

    def run(num_structured: int) -> list[tuple[list[int], list[float]]]:
        driver, values = PlanDriver(runner), {}
        plain = [driver.admit(lettered.prompt(5, seed=index), 12, **params) for index, params in enumerate(kinds)]
        for index in range(num_structured):
            driver.admit(lettered.prompt(3 + index % 4, seed=index), 30, **following(**(SAMPLED if index % 2 else {})))
        for _ in range(12):
            reported = driver.step().reports.logprobs
            for place, sequence in enumerate(plain):
                values.setdefault(sequence.slot, []).extend(reported.values[4 * place : 4 * place + 4].tolist())
        return [(sequence.output[:12], values[sequence.slot]) for sequence in plain]

    assert run(0) == run(1) == run(25)


def test_samples_equal_sequences_with_their_seeds(runner, lettered) -> None:
    prompt, params = lettered.prompt(8), following("(a|b|c){5,15}", temperature=2.0)
    alone = [run_alone(runner, prompt, seed=seed, **params).output for seed in range(4)]
    driver = PlanDriver(runner)
    parent = driver.admit(prompt, 40, seed=0, **params)
    sequences = driver.fork(parent, seeds=(3, 1, 2))
    driver.run()
    assert [sequence.output for sequence in sequences] == alone
    assert len({tuple(output) for output in alone}) > 1


def possible(output: StepOutput, num_beams: int) -> list[set[int]]:
    """Returns the candidates of each beam that have a probability. All numbers of a beam are defined."""
    candidates = output.reports.candidates
    assert not np.isnan(candidates.values).any()
    pairs = zip(candidates.token_ids.tolist(), candidates.values.tolist(), strict=True)
    found = [token_id if value > -np.inf else None for token_id, value in pairs]
    size = len(found) // num_beams
    return [{each for each in found[size * beam : size * (beam + 1)] if each is not None} for beam in range(num_beams)]


def test_candidates_of_beams_are_allowed_and_branches_follow_them(runner, lettered) -> None:
    driver = PlanDriver(runner)
    first = driver.admit(lettered.prompt(5), 30, num_candidates=8, **following("(a|b|cc)(a|b)?"))
    a, b, c, ab, bb = 2, 3, 4, 5, 11
    assert possible(driver.step(), 1) == [{a, b, c, ab, 6, 8, bb}]
    second = driver.add_beam(first)
    assert possible(driver.step(branches=((first, first, a), (second, first, bb))), 2) == [{a, b, EOS}, {EOS}]
    # A branch to a token that is not allowed ends nothing but the beam itself.
    output = driver.step(branches=((second, first, b), (first, first, c)))
    assert possible(output, 2) == [set(), {EOS}]


@pytest.mark.parametrize("grammar", ["x", LLMatcher.grammar_from_regex("d"), LLMatcher.grammar_from_lark("(")])
def test_a_beam_whose_grammar_cannot_be_followed_has_no_candidates(grammar, runner, lettered) -> None:
    """That is how the scheduler learns of it: beams have no reason to end with."""
    driver = PlanDriver(runner)
    driver.admit(lettered.prompt(5), 30, num_candidates=8, grammar=grammar, eos_token_ids=EOS_IDS)
    driver.admit(lettered.prompt(5), 30, num_candidates=8, **following("(a|b)b"))
    a, b, ab, bb = 2, 3, 5, 11
    assert possible(driver.step(), 2) == [set(), {a, b, ab, bb}]


def test_a_reused_slot_follows_its_own_grammar_or_none(runner, lettered) -> None:
    prompt = lettered.prompt(6)
    plain, other = run_alone(runner, prompt).output, run_alone(runner, prompt, **following("c+")).output
    driver = PlanDriver(runner)
    first = driver.admit(prompt, 40, **following())
    driver.step()
    for params, expected in (({}, plain), (following("c+"), other), ({}, plain)):
        driver.retire(first)
        first = driver.admit(prompt, 40, **params)
        slot = first.slot
        for _ in expected:
            driver.step()
        assert (first.output, slot) == (expected, 0)


def test_a_new_lease_has_no_grammars(runner, lettered) -> None:
    prompt = lettered.prompt(6)
    plain = run_alone(runner, prompt).output
    driver = PlanDriver(runner)
    driver.admit(prompt, 40, **following())
    driver.step()
    assert run_alone(runner, prompt).output == plain


def test_overrun_steps_follow_nothing(runner, lettered) -> None:
    prompt = lettered.prompt(6)
    driver = PlanDriver(runner)
    ended = driver.admit(prompt, 40, **following("a"))
    beside = driver.admit(prompt, 40, **following())
    while not ended.reason:
        driver.step()
    output = list(ended.output)
    for _ in range(3):
        driver.step()
    assert (ended.reason, ended.output[: len(output)]) == (EndReason.EOS, output)
    assert beside.output[:4] == run_alone(runner, prompt, **following()).output[:4]


def test_a_prompt_in_chunks_is_followed_from_its_end(runner, lettered) -> None:
    prompt = lettered.prompt(23)
    whole = run_alone(runner, prompt, **following())
    driver = PlanDriver(runner)
    chunked = driver.admit(prompt, 40, max_chunk=4, **following())
    driver.run()
    assert chunked.output == whole.output


def test_a_row_that_is_not_finite_ends_its_sequence_with_that_reason(lettered, make_runner, monkeypatch) -> None:
    runner = make_runner(lettered.directory)
    driver = PlanDriver(runner)
    broken, beside = (driver.admit(lettered.prompt(6), 40, **following()) for _ in range(2))
    driver.step()
    forward = runner.model.forward

    def poisoned(*args: object) -> object:
        logits = forward(*args)
        logits[0] = float("nan")
        return logits

    monkeypatch.setattr(runner.model, "forward", poisoned, raising=False)
    driver.step()
    monkeypatch.undo()
    driver.retire(broken)
    driver.run()
    assert (broken.reason, beside.reason) == (EndReason.NOT_FINITE, EndReason.EOS)
    assert beside.output == run_alone(runner, lettered.prompt(6), **following()).output


def test_rules_may_refer_three_times_as_deeply_as_the_scheduler_lets_them(runner, lettered) -> None:
    """The threads of the executor have four times the stack of the process that compiles grammars first."""
    depth = 3_600
    lark = "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(depth)), f'r{depth}: "a" "b" "a"'])
    grammar = json.dumps({"grammars": [{"lark_grammar": lark}]})
    sequence = run_alone(runner, lettered.prompt(4), grammar=grammar, eos_token_ids=EOS_IDS)
    assert sequence.reason is EndReason.EOS
    assert text_of(sequence.output) == "aba"


def test_copies_of_a_grammar_are_followed_one_at_a_time(runner) -> None:
    started = runner.slots._grammars._grammars.start((following()["grammar"], (EOS,))).result()
    assert started.run is not None
    started.run.compiled.turn.take()
    with pytest.raises(Busy):
        follow(started, [TEXTS.index("ab")], is_own=False)
    started.run.compiled.turn.give()
    assert follow(started, [TEXTS.index("ab")], is_own=False).allows(TEXTS.index("a"))
