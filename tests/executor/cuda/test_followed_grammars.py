"""Grammars in the GPU's runner: it equals the reference, beside plain sequences, samples and beams."""

from __future__ import annotations

import pytest
from llguidance import LLMatcher

from executor.plans.plan import EndReason, Fork
from tests.support.cuda.runner_pair import DEVICE, FinishingRunner, make_pair
from tests.support.executor.letters import EOS, make_lettered
from tests.support.executor.plan_driver import PlanDriver, ints

pytestmark = pytest.mark.timeout(300)
GRAMMAR = LLMatcher.grammar_from_regex("(ab|c)(a|bb){2,4}")


def test_grammars_equal_the_reference(tmp_path) -> None:
    source = make_lettered(tmp_path / "lettered")
    both = make_pair(source.directory, DEVICE)
    params = {"grammar": GRAMMAR, "eos_token_ids": ints(EOS)}
    runs = []
    for runner in (both.reference, FinishingRunner(both.cuda)):
        driver = PlanDriver(runner)
        plain = driver.admit(source.prompt(3), 12)
        own = driver.admit(source.prompt(4), 12, **params)
        drawn = driver.admit(source.prompt(4), 12, temperature=1.0, seed=3, **params)
        wrong = driver.admit(source.prompt(5), 12, **{**params, "grammar": "x"})
        against = driver.admit(source.prompt(4), 12, temperature=1.0, allowed_token_ids=ints(EOS, 90), **params)
        driver.step(forks=(Fork(drawn.slot, 5, seed=9),))
        for _ in range(9):
            driver.step()
        assert own.reason is EndReason.EOS
        assert wrong.reason is against.reason is EndReason.GRAMMAR
        runs.append([(each.output[:6], each.reason) for each in (plain, own, drawn)])
        runs[-1].append(driver.sequences[-1].reason)
    assert runs[0] == runs[1]


def test_candidates_of_beams_equal_the_reference(tmp_path) -> None:
    source = make_lettered(tmp_path / "lettered")
    both = make_pair(source.directory, DEVICE)
    found = []
    for runner in (both.reference, FinishingRunner(both.cuda)):
        driver = PlanDriver(runner)
        beam = driver.admit(source.prompt(4), 9, num_candidates=3, grammar=GRAMMAR, eos_token_ids=ints(EOS))
        reports = [driver.step(), driver.step(branches=((beam, beam, 4),))]
        found.append([output.reports.candidates.token_ids.tolist() for output in reports])
    assert found[0] == found[1]
