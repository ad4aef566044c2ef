"""The buffer returns log-probabilities unchanged, in any portions."""

from __future__ import annotations

import math
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


@pytest.mark.parametrize("has_bytes", [False, True])
@pytest.mark.parametrize("width", [1, 2, 21, 33])
def test_many_entries_become_the_same_messages_as_few(width: int, *, has_bytes: bool) -> None:
    """Many are encoded at once, and a few one by one."""
    randomness = random.Random(width)
    ids = [0, 1, 127, 128, 2**14 - 1, 2**14, 2**21, 2**28 - 1, 2**28, 2**32 - 1]
    logprobs = [0.0, -0.0, -1e-45, -0.1, -9999.0, -math.inf]
    made = [
        TokenLogprobs(*([randomness.choice(each) for _ in range(width)] for each in (ids, logprobs, ids)))
        for _ in range(150)
    ]
    token_bytes = (lambda token_id: b"\xff%d" % token_id) if has_bytes else None
    at_once, one_by_one = LogprobBuffer(width, token_bytes), LogprobBuffer(width, token_bytes)
    at_once.extend(made)
    one_by_one.extend(made)
    many = at_once.take(150)
    few = [each for _ in range(150) for each in one_by_one.take(1)]
    assert [each.SerializeToString() for each in many] == [each.SerializeToString() for each in few]
    assert [list(each.top) for each in many] == [list(each.top) for each in few]


def test_token_of_another_width_is_refused() -> None:
    buffer = LogprobBuffer(3)
    with pytest.raises(ValueError, match="2 tokens, expected 3"):
        buffer.extend(tokens(0, 1))
    assert len(buffer) == 0
