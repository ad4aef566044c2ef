"""Masks that are late: a step does not wait for them, and their sequences go on from the same tokens later."""

from __future__ import annotations

import threading
from math import inf
from typing import TYPE_CHECKING

import pytest
from llguidance import LLMatcher

from executor.grammars import grammar_cache, slot_grammar
from executor.grammars.followed import FollowedGrammar, follow
from executor.plans.plan import EndReason, Fork
from tests.support.executor.letters import EOS
from tests.support.executor.plan_driver import DrivenSequence, PlanDriver, ints, run_alone

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


GRAMMAR = LLMatcher.grammar_from_regex("(ab|c)(a|bb){3,9}c?")
Found = dict[int, list[tuple[int, float]]]
"""The candidates of each beam, by slot, with their log-probabilities."""

PARAMS = {"grammar": GRAMMAR, "eos_token_ids": ints(EOS), "temperature": 1.5, "seed": 7}


class Gate:
    """Holds up the mask after an output until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_held = 0
        self.holds = 1 << 20
        self.is_open = threading.Event()
        self._num_followed = 0
        monkeypatch.setattr(grammar_cache, "follow", self._follow)

    def _follow(self, before: FollowedGrammar, token_ids: Sequence[int], *, is_own: bool) -> FollowedGrammar:
        self._num_followed += 1
        if self._num_followed >= self.holds:
            self.num_held += 1
            assert self.is_open.wait(30)
        return follow(before, token_ids, is_own=is_own)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No mask is late because other processes use the cores, but for tests that set another time."""
    monkeypatch.setattr(slot_grammar, "MAX_WAIT_S", 60.0)


def admit_again(driver: PlanDriver, sequence: DrivenSequence) -> DrivenSequence:
    """Admits the rest of a deferred sequence. Its last token has no meaning."""
    num_left = sequence.params.max_total_tokens - len(sequence.tokens) + 1
    return driver.admit(
        sequence.tokens[:-1], num_left, **{**PARAMS, "num_prompt_tokens": sequence.params.num_prompt_tokens}
    )


@pytest.mark.parametrize("holds", [1, 2, 4])
def test_a_sequence_whose_mask_is_late_goes_on_as_it_would_have(holds, gate, monkeypatch, runner, lettered) -> None:
    prompt = lettered.prompt(6)
    whole, plain = run_alone(runner, prompt, **PARAMS), run_alone(runner, lettered.prompt(4))
    monkeypatch.setattr(slot_grammar, "MAX_WAIT_S", 0.05)
    gate._num_followed, gate.holds = 0, holds
    driver = PlanDriver(runner)
    sequence, beside = driver.admit(prompt, 40, **PARAMS), driver.admit(lettered.prompt(4), 40)
    for _ in range(holds + 1):
        driver.step()
    assert sequence.reason is EndReason.DEFERRED
    assert sequence.output[:-1] == whole.output[:holds]
    waited_ns = runner.slots._grammars._counts.waited_ns
    again = admit_again(driver, sequence)
    driver.step()
    assert again.reason is EndReason.DEFERRED
    assert runner.slots._grammars._counts.waited_ns - waited_ns < 50e6, "no step waits for it twice"
    gate.is_open.set()
    monkeypatch.setattr(slot_grammar, "MAX_WAIT_S", 60.0)
    key = again.params.grammar, (EOS,)
    runner.slots._grammars._grammars._deferred[key, tuple(whole.output[:holds])].result()
    last = admit_again(driver, again)
    driver.run()
    assert gate.num_held == len(whole.output) - holds, "the mask that was late was computed once"
    assert (last.tokens, last.reason) == (whole.tokens, EndReason.EOS)
    assert beside.tokens[: len(plain.tokens)] == plain.tokens[: len(beside.tokens)]


def test_samples_of_one_prompt_are_deferred_each(gate, monkeypatch, runner, lettered) -> None:
    monkeypatch.setattr(slot_grammar, "MAX_WAIT_S", 0.05)
    gate.holds = 1
    driver = PlanDriver(runner)
    parent = driver.admit(lettered.prompt(5), 12, **PARAMS)
    driver.step(forks=(Fork(parent.slot, 9, seed=3),))
    driver.step()
    assert [sequence.reason for sequence in driver.sequences] == [EndReason.DEFERRED] * 2


def search(driver: PlanDriver, prompt: list[int], beside: list[int], open_gate: Callable[[int], None]) -> list[Found]:
    """Returns the candidates of two beams at each of three steps, each asked for until no mask is late.

    open_gate  called with the number of times that they were asked for before
    """
    first = driver.admit(prompt, 9, **{**PARAMS, "num_candidates": 3})
    driver.admit(beside, 30)
    found = [ask(driver, open_gate)]
    second = driver.add_beam(first)
    found.append(ask(driver, open_gate, branches=((first, first, 0), (second, first, 2))))
    found.append(ask(driver, open_gate, branches=((first, second, 0), (second, first, 1))))
    return found


def ask(driver: PlanDriver, open_gate: Callable[[int], None], **plan: object) -> Found:
    values: dict[int, list[tuple[int, float]]] = {}
    for number in range(8):
        beams = [each.slot for each in driver.sequences if each.params.num_candidates and each.slot not in values]
        reported = driver.step(**plan).reports.candidates  # type: ignore[arg-type]
        assert reported is not None
        plan = {}
        pairs = list(zip(reported.token_ids.tolist(), reported.values.tolist(), strict=True))
        own = {slot: pairs[3 * place : 3 * place + 3] for place, slot in enumerate(sorted(beams))}
        values |= {slot: found for slot, found in own.items() if found[0][1] != inf}
        if len(values) == sum(bool(each.params.num_candidates) for each in driver.sequences):
            return values
        open_gate(number)
    raise AssertionError("a mask is late for ever")


def same(found: list[Found], whole: list[Found], tolerance: float) -> bool:
    """Returns whether the tokens are equal, and their log-probabilities within the tolerance."""
    return len(found) == len(whole) and all(
        own.keys() == other.keys()
        and all(
            [token for token, _ in own[slot]] == [token for token, _ in other[slot]]
            and [value for _, value in own[slot]] == pytest.approx([value for _, value in other[slot]], abs=tolerance)
            for slot in own
        )
        for own, other in zip(found, whole, strict=True)
    )


def test_late_beams_are_computed_again_and_find_the_same(request, gate, monkeypatch, runner, lettered) -> None:
    # The last bits of the reference kernels depend on the batch.
    tolerance = 1e-5 if request.node.callspec.params["runner"] == "reference" else 0.0
    prompt, beside = lettered.prompt(6), lettered.prompt(4)
    driver = PlanDriver(runner)
    whole = search(driver, prompt, beside, lambda _: None)
    plain = driver.sequences[1].tokens
    monkeypatch.setattr(slot_grammar, "MAX_WAIT_S", 0.05)
    for holds in (1, 2, 3):
        gate._num_followed, gate.holds = 0, holds
        gate.is_open.clear()
        num_before = runner.slots._grammars._counts.num_deferred
        driver = PlanDriver(runner)

        def open_gate(number: int) -> None:
            if number == 2:
                gate.is_open.set()
                monkeypatch.setattr(slot_grammar, "MAX_WAIT_S", 60.0)
                for own in runner.slots._grammars._by_slot.values():
                    own.pending.result()

        assert same(search(driver, prompt, beside, open_gate), whole, tolerance)
        assert runner.slots._grammars._counts.num_deferred - num_before >= 3
        beside_tokens = driver.sequences[1].tokens
        assert beside_tokens[: len(plain)] == plain[: len(beside_tokens)]
        monkeypatch.setattr(slot_grammar, "MAX_WAIT_S", 0.05)


def test_a_grammar_that_compiles_for_long_defers_its_first_token(monkeypatch, runner, lettered) -> None:
    prompt = lettered.prompt(6)
    whole = run_alone(runner, prompt, **PARAMS)
    is_open, begin = threading.Event(), grammar_cache.begin

    def held(*arguments: object) -> FollowedGrammar:
        assert is_open.wait(30)
        return begin(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(grammar_cache, "begin", held)
    monkeypatch.setattr(slot_grammar, "MAX_WAIT_S", 0.05)
    runner.slots._grammars._grammars._started.clear()
    driver = PlanDriver(runner)
    sequence = driver.admit(prompt, 40, **PARAMS)
    driver.step()
    assert sequence.reason is EndReason.DEFERRED
    is_open.set()
    monkeypatch.setattr(slot_grammar, "MAX_WAIT_S", 60.0)
    runner.slots._grammars._grammars.start((GRAMMAR, (EOS,))).result()
    again = admit_again(driver, sequence)
    driver.run()
    assert again.tokens == whole.tokens


def test_deferred_states_are_kept_within_a_bound(monkeypatch, runner, lettered) -> None:
    monkeypatch.setattr(grammar_cache, "_MAX_DEFERRED", 2)
    grammars = runner.slots._grammars._grammars
    grammars._deferred.clear()
    grammars._num_deferred_characters = 0
    pending = grammars.start((GRAMMAR, (EOS,)))
    key, num_before = (GRAMMAR, (EOS,)), grammars.counts.num_deferred
    for token in range(4):
        grammars.keep_deferred(key, (token,), pending)
    assert [grammars.deferred(key, (token,)) for token in range(4)] == [None, None, pending, pending]
    assert grammars.deferred(key, (3,)) is None, "it is used once"
    assert grammars.counts.num_deferred == num_before + 4
    monkeypatch.setattr(grammar_cache, "MAX_CACHED_CHARACTERS", 2 * len(GRAMMAR) - 1)
    for token in (0, 0, 1):
        grammars.keep_deferred(key, (token,), pending)
    assert [grammars.deferred(key, (token,)) for token in range(2)] == [None, pending]
    assert grammars._num_deferred_characters == 0
    run = pending.result().run
    assert run is not None
    run.compiled.is_spent = True
    grammars.keep_deferred(key, (), pending)
    assert grammars.deferred(key, ()) is None, "its copies would fail, and the grammar is begun anew"
