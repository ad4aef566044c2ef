"""Grammars in the GPU's runner: it equals the reference, beside plain sequences, samples and beams."""

from __future__ import annotations

import threading
from math import inf
from typing import TYPE_CHECKING

import pytest
from llguidance import LLMatcher

from executor.grammars import grammar_cache, slot_grammar
from executor.plans.plan import EndReason, Fork
from tests.support.cuda.runner_pair import DEVICE, FinishingRunner, make_pair
from tests.support.executor.letters import EOS, make_lettered
from tests.support.executor.plan_driver import PlanDriver, ints

if TYPE_CHECKING:
    from executor.grammars.followed import FollowedGrammar
    from executor.plans.plan import Logprobs

pytestmark = pytest.mark.timeout(300)
GRAMMAR = LLMatcher.grammar_from_regex("(ab|c)(a|bb){2,4}")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets steps wait for masks however slow the machine is."""
    monkeypatch.setattr(slot_grammar, "MAX_WAIT_S", 60.0)


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


def test_a_sequence_whose_mask_is_late_ends_deferred_and_its_neighbour_goes_on(tmp_path, monkeypatch) -> None:
    source = make_lettered(tmp_path / "lettered")
    both = make_pair(source.directory, DEVICE)
    params = {"grammar": GRAMMAR, "eos_token_ids": ints(EOS)}
    expected = PlanDriver(both.reference)
    wanted, plain = expected.admit(source.prompt(4), 12, **params), expected.admit(source.prompt(3), 6)
    expected.run()
    monkeypatch.setattr(slot_grammar, "MAX_WAIT_S", 0.05)
    is_open, follow = threading.Event(), grammar_cache.follow

    def held(*arguments: object, **options: object) -> FollowedGrammar:
        assert is_open.wait(30)
        return follow(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(grammar_cache, "follow", held)
    driver = PlanDriver(FinishingRunner(both.cuda))
    own, beside = driver.admit(source.prompt(4), 12, **params), driver.admit(source.prompt(3), 6)
    driver.step()
    driver.step()
    assert (own.reason, own.output[0]) == (EndReason.DEFERRED, wanted.output[0])
    is_open.set()
    monkeypatch.setattr(slot_grammar, "MAX_WAIT_S", 60.0)
    again = driver.admit(own.tokens[:-1], 11, **{**params, "num_prompt_tokens": 4})
    driver.run()
    assert (again.tokens, again.reason) == (wanted.tokens, EndReason.EOS)
    assert beside.output == plain.output


def test_a_late_beam_is_computed_again_and_its_candidates_equal_the_reference(tmp_path, monkeypatch) -> None:
    source = make_lettered(tmp_path / "lettered")
    both = make_pair(source.directory, DEVICE)
    is_open, follow = threading.Event(), grammar_cache.follow

    def held(*arguments: object, **options: object) -> FollowedGrammar:
        assert is_open.wait(30)
        return follow(*arguments, **options)  # type: ignore[arg-type]

    def search(driver: PlanDriver, *, is_late: bool) -> tuple[list[Logprobs], list[int]]:
        beam = driver.admit(source.prompt(4), 9, num_candidates=3, grammar=GRAMMAR, eos_token_ids=ints(EOS))
        plain, found = driver.admit(source.prompt(3), 6), [driver.step().reports.candidates]
        for token_id in (4, 5):
            is_open.clear()
            monkeypatch.setattr(slot_grammar, "MAX_WAIT_S", 0.05 if is_late else 60.0)
            found.append(driver.step(branches=((beam, beam, token_id),)).reports.candidates)
            if is_late:
                assert found.pop().values.tolist() == [inf] * 3
                is_open.set()
                monkeypatch.setattr(slot_grammar, "MAX_WAIT_S", 60.0)
                both.cuda.slots._grammars._by_slot[beam.slot].pending.result()
                found.append(driver.step().reports.candidates)
        return found, plain.output[:3]

    wanted, plain = search(PlanDriver(both.reference), is_late=False)
    monkeypatch.setattr(grammar_cache, "follow", held)
    found, plain_beside = search(PlanDriver(FinishingRunner(both.cuda)), is_late=True)
    assert plain_beside == plain
    for own, other in zip(found, wanted, strict=True):
        assert own.token_ids.tolist() == other.token_ids.tolist()
        assert own.values == pytest.approx(other.values, abs=1e-3)
