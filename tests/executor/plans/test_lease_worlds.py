"""No accepted sequence of plans lets a lease read what another lease has written."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from executor.plans import plan_check
from executor.plans.written_blocks import WrittenBlocks
from tests.support.executor.lease_world import Leak, LeaseWorld

if TYPE_CHECKING:
    from collections.abc import Callable


def run_worlds(seeds: range) -> int:
    """Returns the number of accepted plans. Raises Leak."""
    num_accepted = 0
    for seed in seeds:
        world = LeaseWorld(seed)
        for _ in range(400):
            world.step()
        num_accepted += world.num_accepted
    return num_accepted


@pytest.mark.parametrize("first", [0, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in (10, 40, 70))])
def test_no_lease_reads_what_another_has_written(first: int) -> None:
    assert run_worlds(range(first, first + (15 if first else 10))) > 1000


def forks_begin_anew(patch: pytest.MonkeyPatch) -> None:
    """The tokens that the parent has computed are counted for the child once more."""
    apply = WrittenBlocks.apply

    def counted_again(written: WrittenBlocks, plan: Any, after: Any) -> None:
        apply(written, plan, after)
        written._num_recorded[[fork.child_slot for fork in plan.forks]] = 0

    patch.setattr(WrittenBlocks, "apply", counted_again)


def tables_may_be_short(patch: pytest.MonkeyPatch) -> None:
    """The table of a slot without rows need not cover its computed tokens."""
    check = plan_check._check_rows

    def without_idle_slots(after: Any, limits: Any) -> None:
        check(replace(after, num_blocks=np.where(after.row_count, after.num_blocks, limits.num_blocks)), limits)

    patch.setattr(plan_check, "_check_rows", without_idle_slots)


def entries_are_not_checked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WrittenBlocks, "_check_entries", lambda *_: None)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mutate", [forks_begin_anew, tables_may_be_short, entries_are_not_checked])
def test_each_mutation_is_found(mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    with pytest.raises(Leak):
        run_worlds(range(100))
