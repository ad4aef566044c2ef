"""Steps with reports or changed logits: the GPU's runner against the plain one, token for token."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from executor.cuda.loading import rehearse
from executor.plans.plan import Reports
from executor.sampling.logprobs import Logprobs
from tests.executor.cuda.test_runner import NUM_STEPS, NoLooking, assert_same
from tests.support.cuda.places import DEVICE, Finished
from tests.support.cuda.streams import RandomStream
from tests.support.executor.conductor import Conductor, ints

pytestmark = pytest.mark.timeout(300)
CHANGES: list[dict[str, object]] = [
    {"repetition_penalty": 1.5},
    {"frequency_penalty": 2.0, "presence_penalty": 1.0, "allowed_token_ids": np.arange(0, 250, 31, dtype=np.int32)},
    {"bias_token_ids": ints(3, 4), "bias_values": np.array([60.0, 61.0], np.float32), "presence_penalty": 9.0},
    {"repetition_penalty": 0.8, "temperature": 1.0, "top_p": 0.9, "seed": 4},
    {"repetition_penalty": 1.1, "eos_token_ids": ints(*range(200)), "min_total_tokens": 11},
]
REPORTS: list[dict[str, object]] = [
    {"num_logprobs": 4, "eos_token_ids": ints(*range(0, 200, 2)), "min_total_tokens": 12},
    {"num_logprobs": 1, "num_prompt_logprobs": 3, "temperature": 1.2, "top_k": 9},
    {"num_prompt_logprobs": 1, "repetition_penalty": 1.3},
]


def assert_same_reports(actual: Reports, expected: Reports) -> None:
    for name in ("logprobs", "prompt_logprobs", "candidates"):
        one, other = getattr(actual, name), getattr(expected, name)
        assert (one is None) == (other is None), name
        if isinstance(other, Logprobs):
            assert one.token_ids.tolist() == other.token_ids.tolist()
            np.testing.assert_allclose(one.values, other.values, atol=1e-4)
            assert (one.ranks is None) == (other.ranks is None)
            assert other.ranks is None or one.ranks.tolist() == other.ranks.tolist()


def assert_same_run(one: Conductor, other: Conductor) -> None:
    assert len(one.outputs) == len(other.outputs)
    for actual, expected in zip(one.outputs, other.outputs, strict=True):
        assert_same(actual, expected)
        assert_same_reports(actual.reports, expected.reports)


@pytest.mark.parametrize("kinds", [CHANGES, REPORTS], ids=["changes", "reports"])
def test_beside_others(kinds, pair, checkpoint) -> None:
    """Each in turn comes and goes beside sequences that ask for nothing; prompts in chunks."""
    both, source = pair("llama-biases"), checkpoint("llama-biases")
    conductors = [Conductor(Finished(both.cuda)), Conductor(both.reference)]
    for conductor in conductors:
        plain = conductor.admit(source.prompt(3), 60)
        conductor.admit(source.prompt(4), 60, temperature=1.0, seed=1)
        for number, params in enumerate(kinds):
            conductor.admit(source.prompt(7, seed=number), 6, max_chunk=3, **params)
            for _ in range(3):
                conductor.step()
                for seat in [seat for seat in conductor.seats if seat.reason]:
                    conductor.retire(seat)
        for _ in range(8):
            conductor.step()
            for seat in [seat for seat in conductor.seats if seat.reason]:
                conductor.retire(seat)
        assert plain.output == source.greedy(source.prompt(3), 60)[: len(plain.output)]
    assert_same_run(*conductors)


def test_beams(pair, checkpoint) -> None:
    """Steered by the reference's candidates: permutations, slots taken and left, and a sequence that samples."""
    both, source = pair("llama"), checkpoint("llama")
    conductors = [Conductor(Finished(both.cuda)), Conductor(both.reference)]
    for conductor in conductors:
        conductor.admit(source.prompt(5), 30)
        first = conductor.admit(source.prompt(6), 30, num_candidates=6, repetition_penalty=1.2)
        second = conductor.admit(source.prompt(4), 30, num_candidates=3, num_prompt_logprobs=2)
        conductor.step()
        third = conductor.beam_of(first)
        conductor.step(branches=((first, first, 7), (third, first, 8), (second, second, 9)))
        conductor.step(branches=((first, third, 10), (third, first, 11)))
        conductor.step(branches=((third, third, 12), (first, third, 13), (second, second, 14)))
        conductor.retire(first)
        conductor.step(branches=((third, third, 15),))
        conductor.step()
    assert conductors[1].outputs[-2].reports.candidates is not None
    assert conductors[1].outputs[-1].reports.candidates is None
    assert_same_run(*conductors)


@pytest.mark.parametrize(("name", "num_ahead", "seed"), [("llama", 1, 109), ("llama-biases", 2, 25)])
def test_random_streams(name, num_ahead, seed, pair) -> None:
    """Some sequences ask, most do not, several plans are out: a step with reports waits, the others do not."""
    both = pair(name)
    stream = RandomStream(both.reference.limits, seed, extras=(*CHANGES, *REPORTS, {}, {}, {}, {}))
    for runner in (both.reference, both.cuda):
        runner.reset()
    launched: deque = deque()
    num_plain = num_reporting = 0
    for _ in range(NUM_STEPS):
        plan = stream.plan()
        expected = both.reference.execute(plan)
        launched.append((both.cuda.execute(plan), expected))
        is_plain = expected.reports == Reports()
        num_plain, num_reporting = num_plain + is_plain, num_reporting + (not is_plain)
        if len(launched) == num_ahead:
            step, expected = launched.popleft()
            assert_same(step.finish(), expected)
            assert_same_reports(step.finish().reports, expected.reports)
            stream.learn(expected)
    assert min(num_plain, num_reporting) > 5
    assert min(stream.seen[kind] for kind in ("fork", "EOS", "copy", *(f"extra {which}" for which in range(8)))) > 0


def test_nobody_waits_for_who_asked_before(pair, checkpoint) -> None:
    """When the one that asks has gone, steps are launched without a look at the device again."""
    both, source = pair("llama"), checkpoint("llama")
    conductor = Conductor(Finished(both.cuda))
    plain = conductor.admit(source.prompt(5), 12)
    asking = conductor.admit(source.prompt(3), 3, **CHANGES[0], num_logprobs=2)
    while not asking.reason:
        conductor.step()
    conductor.retire(asking)
    conductor.step()
    with NoLooking():
        conductor.run()
    assert plain.output == source.greedy(source.prompt(5), 12)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="half precision on a GPU rounds otherwise")
def test_prompts_in_pieces(pair, checkpoint, monkeypatch) -> None:
    monkeypatch.setattr("executor.sampling.logprobs._CHUNK", 307 * 2)
    monkeypatch.setattr("executor.cuda.sampler.MAX_NUMBERS", 307)
    both, source = pair("llama"), checkpoint("llama")
    conductors = [Conductor(Finished(both.cuda)), Conductor(both.reference)]
    for conductor in conductors:
        for number, params in enumerate(CHANGES):
            conductor.admit(source.prompt(5, seed=number), 3, num_prompt_logprobs=2, num_logprobs=2, **params)
        conductor.run()
    assert_same_run(*conductors)


def test_a_rehearsal_has_a_step_with_reports(pair, monkeypatch) -> None:
    both, reports = pair("llama"), []
    execute = both.cuda.execute
    monkeypatch.setattr(both.cuda, "execute", lambda plan: reports.append(execute(plan)) or reports[-1])
    rehearse(both.cuda)
    assert any(step.finish().reports.prompt_logprobs is not None for step in reports)
    assert any(step.finish().reports.logprobs is not None for step in reports)
