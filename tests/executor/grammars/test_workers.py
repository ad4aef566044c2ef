"""Workers: grammars that take too long are given up, and nothing else is."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest
from llguidance import LLMatcher

from executor.grammars import grammar_cache, workers
from executor.grammars.followed import FollowedGrammar, Vocabulary, begin, follow
from executor.grammars.grammar_cache import Grammars, load_grammars
from executor.grammars.turn import Turn
from executor.grammars.workers import MAX_STUCK, Pending, Workers
from quire.grammars import grammar_tokenizer
from tests.support.executor.letters import EOS, VOCAB_SIZE, tokenizer_json

FAILED = FollowedGrammar.failed(VOCAB_SIZE)


def known() -> FollowedGrammar:
    return FollowedGrammar(None, FAILED.mask.copy())


class Spinning:
    """Work that takes CPU time until it is released."""

    def __init__(self) -> None:
        self.is_released = threading.Event()

    def __call__(self) -> FollowedGrammar:
        while not self.is_released.is_set():
            pass
        return known()


def test_work_that_takes_too_long_is_given_up_and_another_thread_takes_its_place(monkeypatch) -> None:
    monkeypatch.setattr(workers, "LIMIT_S", 0.05)
    own, state = Workers(1, "test", FAILED), known()
    start = own.submit(lambda: state)
    assert start.result() is state
    spinning = Spinning()
    stuck, behind = own.submit(spinning, start), own.submit(lambda: state)
    assert stuck.result() is FAILED
    assert behind.result() is state
    assert start.result() is FAILED, "the grammar is not begun again"
    spinning.is_released.set()
    deadline_s = time.monotonic() + 30
    while own._num_stuck and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert own._num_stuck == 0
    assert stuck.result() is FAILED, "a late result changes nothing"
    assert own.submit(lambda: state).result() is state


def test_a_grammar_is_refused_for_some_time_after_one_of_its_states_was_given_up(monkeypatch) -> None:
    """One client's output may have brought it there, and that of others is followed in time."""
    own, spinning, key = Grammars(tokenizer_json(), VOCAB_SIZE), Spinning(), ('%llguidance {}\nstart: "a" "b"', (EOS,))
    start = own.start(key)
    start.result()
    monkeypatch.setattr(own._compiling, "_limit_s", 0.05)
    try:
        failed = own._compiling.submit(spinning, start).result()
        assert own.start(key) is start
        assert start.result() is failed
        monkeypatch.setattr(workers, "REFUSED_S", -1.0)
        again = own.start(key)
        monkeypatch.undo()
        assert again is not start
        assert again.result() is not failed
        assert own.start(key) is again
    finally:
        spinning.is_released.set()


def test_the_rest_of_a_batch_is_computed_by_the_thread_that_takes_over(monkeypatch) -> None:
    """The test waits for the last state first, not for the one that takes too long."""
    monkeypatch.setattr(workers, "LIMIT_S", 0.05)
    monkeypatch.setattr(workers, "_POLL_S", 0.01)
    own, state, spinning = Workers(1, "test", FAILED), known(), Spinning()
    batch = [Pending(own, work) for work in (lambda: state, spinning, lambda: state, lambda: state)]
    own.begin(batch)
    try:
        assert batch[3].result() is state
        assert [each.result() is state for each in batch] == [True, False, True, True]
        assert batch[1].result() is FAILED
        assert own.submit(lambda: state).result() is state
    finally:
        spinning.is_released.set()


def test_a_late_state_is_given_up_without_a_wait_for_it(monkeypatch) -> None:
    """Its sequence was cancelled. Its thread is missing to all others."""
    monkeypatch.setattr(workers, "LIMIT_S", 0.05)
    monkeypatch.setattr(workers, "_POLL_S", 0.01)
    own, state, spinning = Workers(1, "test", FAILED), known(), Spinning()
    try:
        own.submit(spinning)
        assert own.submit(lambda: state).result() is state
    finally:
        spinning.is_released.set()


@pytest.mark.parametrize("num_states", [0, 1, 2, 7, 300])
def test_all_states_of_a_batch_are_computed(num_states, monkeypatch) -> None:
    monkeypatch.setattr(workers, "_TOKENS_OF_A_BATCH", 3 * 8 * len(FAILED.mask))
    own, states = Workers(2, "test", FAILED), [known() for _ in range(num_states)]
    batch = [Pending(own, lambda each=each: each) for each in states]
    own.begin(batch)
    assert all(each.result() is state for each, state in zip(batch, states, strict=True))


def test_waiting_for_others_is_not_given_up(monkeypatch) -> None:
    """CPU time counts: work that waits, like a process that was suspended, has used none."""
    monkeypatch.setattr(workers, "LIMIT_S", 0.05)
    monkeypatch.setattr(workers, "_POLL_S", 0.01)
    own, state = Workers(1, "test", FAILED), known()
    gate = threading.Event()
    pending = own.submit(lambda: state if gate.wait(30) else FAILED)
    threading.Timer(0.5, gate.set).start()
    assert pending.result() is state


def test_a_state_waits_while_all_threads_compute_states_that_were_given_up(monkeypatch) -> None:
    monkeypatch.setattr(workers, "LIMIT_S", 0.01)
    own, spinning, state = Workers(1, "test", FAILED), Spinning(), known()
    try:
        for _ in range(MAX_STUCK + 1):
            assert own.submit(spinning).result() is FAILED
        late = own.submit(lambda: state)
        assert late.state_by(0.0) is None
    finally:
        spinning.is_released.set()
    assert late.result() is state


@pytest.mark.parametrize("waits_for_late", [True, False])
def test_a_late_state_is_detached_and_goes_on(waits_for_late, monkeypatch) -> None:
    """The states behind it in its batch, and those that come later, do not wait for it."""
    priorities: list[int] = []
    monkeypatch.setattr(workers.os, "setpriority", lambda which, who, niceness: priorities.append(niceness))
    own, state, spinning = Workers(1, "test", FAILED), known(), Spinning()
    late, behind = Pending(own, spinning), Pending(own, lambda: state)
    own.begin((late, behind))
    if waits_for_late:
        assert late.state_by(time.monotonic() + 0.1) is None
    assert behind.state_by(time.monotonic() + 0.2) is (state if waits_for_late else None)
    assert behind.result() is state
    assert late.state_by(0.0) is None, "it is detached once"
    assert own.submit(lambda: state).result() is state
    assert priorities == [workers._DETACHED]
    spinning.is_released.set()
    assert late.result() is not FAILED
    assert late.state_by(0.0) is late.result()
    deadline_s = time.monotonic() + 30
    while own._num_stuck and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert (own._num_stuck, own._num_missing) == (0, 0)
    assert own.submit(lambda: state).result() is state


def test_a_detached_state_is_given_up_at_the_limit(monkeypatch) -> None:
    monkeypatch.setattr(workers, "LIMIT_S", 0.05)
    own, spinning = Workers(1, "test", FAILED), Spinning()
    start = own.submit(known)
    late = own.submit(spinning, start)
    try:
        assert late.state_by(time.monotonic() + 0.01) is None
        assert late.result() is FAILED
        assert start.result() is FAILED, "the grammar is not begun again"
        assert own.submit(known).result() is not FAILED
    finally:
        spinning.is_released.set()


def test_a_state_waits_while_all_threads_compute_late_ones() -> None:
    own, spinning, state = Workers(1, "test", FAILED), Spinning(), known()
    late = [own.submit(spinning) for _ in range(MAX_STUCK + 1)]
    assert all(each.state_by(time.monotonic() + 0.1) is None for each in late)
    assert own._num_missing == 1
    threading.Timer(3 * workers._POLL_S, spinning.is_released.set).start()
    assert own.submit(lambda: state).result() is state


def test_a_thread_that_cannot_be_started_is_started_later(monkeypatch) -> None:
    own, spinning, state = Workers(1, "test", FAILED), Spinning(), known()
    late, behind = own.submit(spinning), own.submit(lambda: state)

    def fail() -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(own, "_start_thread", fail)
        assert late.state_by(time.monotonic() + 0.1) is None, "the step goes on"
    assert own._num_missing == 1
    spinning.is_released.set()
    assert behind.result() is state
    assert own._num_missing == 0


def test_states_of_a_grammar_that_another_thread_follows_keep_no_thread_and_are_computed_in_order() -> None:
    """A thread that waited inside llguidance would let no other thread have the interpreter."""
    own, turn, state, order = Workers(1, "test", FAILED), Turn(), known(), list[int]()

    def follow_in_turn(number: int) -> FollowedGrammar:
        turn.take()
        order.append(number)
        turn.give()
        return state

    turn.take()
    busy = [own.submit(partial(follow_in_turn, number)) for number in range(5)]
    assert own.submit(lambda: state).result() is state, "the only thread goes on with others"
    assert all(each.state_by(time.monotonic()) is None for each in busy)
    assert order == []
    turn.give()
    assert [each.result() for each in busy] == [state] * 5
    assert order == [0, 1, 2, 3, 4]


def test_no_state_is_forgotten_while_threads_take_turns() -> None:
    own, turn, state, num_inside, num_most = Workers(4, "test", FAILED), Turn(), known(), [0], [0]

    def follow_in_turn() -> FollowedGrammar:
        turn.take()
        num_inside[0] += 1
        num_most[0] = max(num_most[0], num_inside[0])
        time.sleep(0)
        num_inside[0] -= 1
        turn.give()
        return state

    for _ in range(200):
        busy = [own.submit(follow_in_turn) for _ in range(8)]
        assert all(each.result() is state for each in busy)
    assert num_most[0] == 1


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), SystemExit(3)])
def test_an_error_ends_its_own_grammar_only(error) -> None:
    own, state = Workers(1, "test", FAILED), known()

    def fails() -> FollowedGrammar:
        raise error

    first, second = own.submit(fails), own.submit(lambda: state)
    assert first.result() is FAILED
    assert second.result() is state


def test_a_grammar_that_exceeds_a_limit_of_its_work_cannot_be_followed() -> None:
    """It compiles, and the limit on the states of its lexer is reached later."""
    vocabulary = Vocabulary.of(grammar_tokenizer(tokenizer_json(), VOCAB_SIZE, (EOS,)), VOCAB_SIZE, (EOS,))
    state = begin(vocabulary, LLMatcher.grammar_from_regex("((((a?){30}){30}){30}){3}"))
    assert state.run is not None
    for _ in range(500):
        state = follow(state, (2,), is_own=True)
        if state.run is None:
            break
    else:
        pytest.fail("no limit was reached")


def test_compiled_grammars_are_kept_within_bounds(monkeypatch) -> None:
    monkeypatch.setattr(grammar_cache, "MAX_CACHED_GRAMMARS", 3)
    grammars = Grammars(tokenizer_json(), VOCAB_SIZE, (EOS,))
    texts = [LLMatcher.grammar_from_regex("a" * length) for length in range(1, 6)]
    first = grammars.start((texts[0], (EOS,)))
    assert grammars.start((texts[0], (EOS,))) is first
    assert grammars.counts.num_compiled == 1
    assert grammars.start((texts[0], ())) is not first, "EOS ids are part of it"
    for text in texts:
        assert grammars.start((text, (EOS,))).result().run is not None
    assert len(grammars._started) == 3
    assert grammars.start((texts[0], (EOS,))) is not first
    monkeypatch.setattr(grammar_cache, "MAX_CACHED_CHARACTERS", 10)
    grammars.start((texts[1], (EOS,)))
    assert (len(grammars._started), grammars._num_characters) == (0, 0)


def test_eos_ids_that_have_no_logit_cannot_be_followed() -> None:
    grammars = Grammars(tokenizer_json(), VOCAB_SIZE, (EOS,))
    assert grammars.start((LLMatcher.grammar_from_regex("a"), (VOCAB_SIZE + 5,))).result().run is None


@pytest.mark.parametrize("text", [None, "", "{}", "no json", b"\xff\xfe"])
def test_a_checkpoint_without_a_usable_tokenizer_has_no_grammars(text, tmp_path) -> None:
    if text is not None:
        (tmp_path / "tokenizer.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert load_grammars(tmp_path, VOCAB_SIZE) is None
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    assert load_grammars(tmp_path, VOCAB_SIZE) is not None
    assert load_grammars(tmp_path, 5) is None, "the model has fewer tokens"
