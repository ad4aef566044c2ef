"""Turns: one at a time, and what has found a turn taken is called in order."""

from __future__ import annotations

import pytest

from executor.grammars.turn import Busy, Turn


def test_a_turn_is_taken_once_and_each_give_calls_one() -> None:
    turn, called = Turn(), list[int]()
    turn.take()
    with pytest.raises(Busy) as busy:
        turn.take()
    assert busy.value.turn is turn
    for number in range(3):
        turn.when_given(lambda number=number: called.append(number))
    assert called == []
    for number in range(3):
        turn.give()
        assert called == list(range(number + 1))
        turn.take()
    turn.give()
    assert called == [0, 1, 2]


def test_what_asks_after_the_turn_was_given_is_called_at_once_and_the_turn_is_free_then() -> None:
    turn, called = Turn(), list[bool]()

    def take() -> None:
        turn.take()
        called.append(True)
        turn.give()

    turn.when_given(take)
    assert called == [True]
    turn.take()
