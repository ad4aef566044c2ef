"""Token counts, extended token by token, equal a recount."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from executor.slots.token_counts import TokenCounts
from tests.support.executor.plan_driver import ints


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.data())
def test_counts_equal_a_recount(token_ids, data) -> None:
    num_prompt = data.draw(st.integers(0, len(token_ids)))
    num_known = data.draw(st.integers(max(1, num_prompt), max(1, len(token_ids))))
    counts = TokenCounts(ints(*token_ids[:num_known]), num_prompt)
    copy = counts.copy()
    for token_id in token_ids[num_known:]:
        counts.add(token_id)
    for own, known in ((counts, token_ids), (copy, token_ids[:num_known])):
        found = dict(zip(own.ids.tolist(), own.num_output.tolist(), strict=True))
        assert found == {token_id: known[num_prompt:].count(token_id) for token_id in known}


def test_counts_grow_beyond_their_capacity() -> None:
    counts = TokenCounts(ints(3), 1)
    for token_id in range(1000):
        counts.add(token_id)
    assert counts.ids.tolist() == [3, *(token_id for token_id in range(1000) if token_id != 3)]
    assert (counts.num_output == 1).all()
