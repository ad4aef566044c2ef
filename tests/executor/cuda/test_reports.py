"""Steps with reports or changed logits: the GPU's runner equals the reference, token for token."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from executor.cuda.rehearsal import rehearse
from executor.plans.plan import Reports
from executor.sampling.logprobs import Logprobs
from tests.support.cuda.comparison import NoDeviceReads, assert_same
from tests.support.cuda.random_streams import RandomStream
from tests.support.cuda.runner_pair import DEVICE, FinishingRunner
from tests.support.executor.plan_driver import PlanDriver, ints

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


def assert_same_run(one: PlanDriver, other: PlanDriver) -> None:
    assert len(one.outputs) == len(other.outputs)
    for actual, expected in zip(one.outputs, other.outputs, strict=True):
        assert_same(actual, expected)
        assert_same_reports(actual.reports, expected.reports)


@pytest.mark.parametrize("kinds", [CHANGES, REPORTS], ids=["changes", "reports"])
def test_changes_and_reports_equal_the_reference_beside_plain_sequences(kinds, pair, checkpoint) -> None:
    """Runs one sequence of each kind in turn together with plain sequences, with its prompt in chunks."""
    both, source = pair("llama-biases"), checkpoint("llama-biases")
    drivers = [PlanDriver(FinishingRunner(both.cuda)), PlanDriver(both.reference)]
    for driver in drivers:
        plain = driver.admit(source.prompt(3), 60)
        driver.admit(source.prompt(4), 60, temperature=1.0, seed=1)
        for number, params in enumerate(kinds):
            driver.admit(source.prompt(7, seed=number), 6, max_chunk=3, **params)
            for _ in range(3):
                driver.step()
                for sequence in [sequence for sequence in driver.sequences if sequence.reason]:
                    driver.retire(sequence)
        for _ in range(8):
            driver.step()
            for sequence in [sequence for sequence in driver.sequences if sequence.reason]:
                driver.retire(sequence)
        assert plain.output == source.greedy(source.prompt(3), 60)[: len(plain.output)]
    assert_same_run(*drivers)


def test_beams_equal_the_reference(pair, checkpoint) -> None:
    """Covers permuted beams, slots that are taken and freed, and a sequence that samples in the same steps."""
    both, source = pair("llama"), checkpoint("llama")
    drivers = [PlanDriver(FinishingRunner(both.cuda)), PlanDriver(both.reference)]
    for driver in drivers:
        driver.admit(source.prompt(5), 30)
        first = driver.admit(source.prompt(6), 30, num_candidates=6, repetition_penalty=1.2)
        second = driver.admit(source.prompt(4), 30, num_candidates=3, num_prompt_logprobs=2)
        driver.step()
        third = driver.add_beam(first)
        driver.step(branches=((first, first, 7), (third, first, 8), (second, second, 9)))
        driver.step(branches=((first, third, 10), (third, first, 11)))
        driver.step(branches=((third, third, 12), (first, third, 13), (second, second, 14)))
        driver.retire(first)
        driver.step(branches=((third, third, 15),))
        driver.step()
    assert drivers[1].outputs[-2].reports.candidates is not None
    assert drivers[1].outputs[-1].reports.candidates is None
    assert_same_run(*drivers)


@pytest.mark.parametrize(
    ("name", "num_ahead", "seed", "num_steps"),
    [("llama", 1, 109, 60), ("llama-biases", 2, 25, 60)]
    if DEVICE.type == "cuda"
    else [("llama", 1, 548, 18), ("llama-biases", 2, 25, 25)],
)
def test_random_streams_equal_the_reference(name, num_ahead, seed, num_steps, pair) -> None:
    """Few sequences have reports and several plans are in flight: only steps with reports wait.

    num_steps  so many that each kind of change and report is seen; in the interpreter no more than that
    """
    both = pair(name)
    stream = RandomStream(both.reference.limits, seed, extras=(*CHANGES, *REPORTS, {}, {}, {}, {}))
    for runner in (both.reference, both.cuda):
        runner.reset()
    launched: deque = deque()
    num_plain = num_reporting = 0
    for _ in range(num_steps):
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


def test_plain_steps_do_not_wait_after_a_reporting_sequence_has_left(pair, checkpoint) -> None:
    """Once the sequence with reports has left, steps are launched without reading from the device."""
    both, source = pair("llama"), checkpoint("llama")
    driver = PlanDriver(FinishingRunner(both.cuda))
    plain = driver.admit(source.prompt(5), 12)
    reporting = driver.admit(source.prompt(3), 3, **CHANGES[0], num_logprobs=2)
    while not reporting.reason:
        driver.step()
    driver.retire(reporting)
    driver.step()
    with NoDeviceReads():
        driver.run()
    assert plain.output == source.greedy(source.prompt(5), 12)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="half precision on a GPU rounds otherwise")
def test_prompt_reports_in_pieces_equal_the_reference(pair, checkpoint, monkeypatch) -> None:
    monkeypatch.setattr("executor.sampling.logprobs._CHUNK", 307 * 2)
    monkeypatch.setattr("executor.cuda.sampler.MAX_NUMBERS", 307)
    both, source = pair("llama"), checkpoint("llama")
    drivers = [PlanDriver(FinishingRunner(both.cuda)), PlanDriver(both.reference)]
    for driver in drivers:
        for number, params in enumerate(CHANGES):
            driver.admit(source.prompt(5, seed=number), 3, num_prompt_logprobs=2, num_logprobs=2, **params)
        driver.run()
    assert_same_run(*drivers)


def test_the_rehearsal_includes_reports(pair, monkeypatch) -> None:
    both, reports = pair("llama", max_num_seqs=2, max_num_batched_tokens=6), []
    execute = both.cuda.execute
    monkeypatch.setattr(both.cuda, "execute", lambda plan: reports.append(execute(plan)) or reports[-1])
    rehearse(both.cuda)
    assert any(step.finish().reports.prompt_logprobs is not None for step in reports)
    assert any(step.finish().reports.logprobs is not None for step in reports)
