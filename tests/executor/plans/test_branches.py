"""Branches of beams: which are rejected, and what they copy."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from executor.errors import PlanRejected
from tests.support.executor.checked_plans import BEAM, admission, beams, busy_slots, plan, state
from tests.support.executor.plan_driver import ints, tuples

if TYPE_CHECKING:
    from executor.slots.slots import Slots


@pytest.fixture
def slots() -> Slots:
    return busy_slots()


@pytest.fixture
def group(slots: Slots) -> Slots:
    """Returns four slots: 0 and 1 are idle, 2 is a beam of five tokens that has reported, 3 is a beam that has not."""
    return grouped(slots)


def grouped(slots: Slots) -> Slots:
    slots.apply(
        plan(
            admissions=(admission(2, params=BEAM), admission(3, params=BEAM)),
            row_counts=tuples(2, (0, 0), (1, 0), (2, 5)),
        )
    )
    slots.advance()
    return slots


BAD_BRANCHES = {
    "twice": (beams((2, 2, 5), (2, 2, 6)), "branches: slot named twice"),
    "over a living one": (beams((0, 2, 5)), "branches: slot 0 is taken"),
    "over one that has not reported": (beams((3, 2, 5)), "branches: slot 3 is taken"),
    "from one that has not reported": (beams((2, 3, 5)), "parent slot 3 is not a beam that has reported"),
    "token": (beams((2, 2, 100)), "branches: token id 100"),
    "token negative": (beams((2, 2, -1)), "branches: token id -1"),
    "retired parent": (beams((3, 2, 5), retired_slots=ints(2, 3)), "slot 2 is empty"),
    "table too short": (
        beams((2, 2, 5), table_updates=tuples(3, (2, 1, 8)), row_counts=tuples(2, (2, 2))),
        "2 tokens to compute after 5, but only 6 are known",
    ),
    "no branch": (plan(row_counts=tuples(2, (2, 1))), "1 tokens to compute after 5, but only 5 are known"),
}


@pytest.mark.parametrize("name", BAD_BRANCHES)
def test_a_bad_branch_is_rejected_and_changes_nothing(name, group) -> None:
    bad, message = BAD_BRANCHES[name]
    before = state(group)
    with pytest.raises(PlanRejected) as rejection:
        group.apply(bad)
    assert message in str(rejection.value)
    for key, value in state(group).items():
        np.testing.assert_array_equal(value, before[key], err_msg=key)


def test_a_beam_of_max_model_len_cannot_branch(slots) -> None:
    long = replace(BEAM, max_total_tokens=20)
    slots.apply(
        plan(
            retired_slots=ints(*np.flatnonzero(slots.counters.is_admitted)),
            admissions=(admission(2, 19, blocks=(5, 6, 7, 8, 9), params=long),),
            row_counts=tuples(2, (2, 12)),
        )
    )
    slots.advance()
    slots.apply(plan(row_counts=tuples(2, (2, 7))))
    slots.advance()
    slots.apply(beams((2, 2, 5)))
    slots.advance()
    assert slots.counters.num_tokens[2] == 20
    with pytest.raises(PlanRejected, match="parent slot 2 has max_model_len 20 tokens already"):
        slots.apply(beams((2, 2, 5)))


def test_branches_are_simultaneous(group) -> None:
    """A beam branches into two slots, one of which is another beam's; each copy is of the state before all branches."""
    group.apply(beams((2, 2, 41), (3, 2, 42), retired_slots=ints(3)))
    assert group.counters.row_count[2:].tolist() == [1, 1]
    group.advance()
    assert group.counters.row_count[2:].tolist() == [0, 0]
    group.apply(beams((2, 3, 43), (3, 2, 44)))
    assert group.token_ids[2, :7].tolist() == [0, 1, 2, 3, 4, 42, 43]
    assert group.token_ids[3, :7].tolist() == [0, 1, 2, 3, 4, 41, 44]
    group.advance()
    group.apply(beams((2, 3, 45), (3, 3, 46), (1, 2, 47), retired_slots=ints(1)))
    assert group.token_ids[1:, :8].tolist() == [
        [0, 1, 2, 3, 4, 42, 43, 47],
        [0, 1, 2, 3, 4, 41, 44, 45],
        [0, 1, 2, 3, 4, 41, 44, 46],
    ]
    assert group.block_tables[1:, :2].tolist() == [[5, 6]] * 3
    assert group.counters.num_tokens.tolist() == [7, 8, 8, 8]
    assert (group.beams.tolist(), group.sampling.tolist()) == ([1, 2, 3], [])
    assert not group.counters.has_ended[1:].any()
