"""The buffer returns log-probabilities unchanged, in any portions."""

from __future__ import annotations

import random

import pytest

from scheduler.core import TokenLogprobs
from scheduler.requests.logprob_buffer import LogprobBuffer


def tokens(first: int, count: int) -> list[TokenLogprobs]:
    return [TokenLogprobs([n, n + 1], [-float(n), -0.5], [n % 7, 1]) for n in range(first, first + count)]


def test_tokens_are_returned_unchanged_and_in_order() -> None:
    randomness, buffer = random.Random(5), LogprobBuffer(2)
    num_in = num_out = 0
    for _ in range(400):
        count = randomness.randrange(30)
        buffer.extend(tokens(num_in, count))
        num_in += count
        taken = buffer.take(randomness.randrange(len(buffer) + 1))
        assert [token.chosen.token_id for token in taken] == list(range(num_out, num_out + len(taken)))
        assert [token.top[0].token_id for token in taken] == list(range(num_out + 1, num_out + len(taken) + 1))
        assert [token.chosen.rank for token in taken] == [n % 7 for n in range(num_out, num_out + len(taken))]
        num_out += len(taken)
        assert len(buffer) == num_in - num_out
    assert num_out > 1000
    assert len(buffer._ids) <= 2 * 2 * len(buffer) + 2, "entries that were taken are dropped soon"


def test_token_of_another_width_is_refused() -> None:
    buffer = LogprobBuffer(3)
    with pytest.raises(ValueError, match="2 tokens, expected 3"):
        buffer.extend(tokens(0, 1))
    assert len(buffer) == 0
