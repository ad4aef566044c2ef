"""A plan that would read KV that its lease has not written is refused, whatever the pool still holds."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from executor.errors import PlanRejected
from executor.plans.plan import Admission, Fork, StepPlan
from executor.slots.slots import Slots
from tests.support.executor.checked_plans import LIMITS, PARAMS, admission, busy_slots, plan, state
from tests.support.executor.plan_driver import ints, tuples

# busy_slots: slot 0 has written 6 tokens, to blocks 1 and 2 (4 + 2); slot 1 has written 2 tokens, to block 3.


@pytest.mark.parametrize("num_tokens", [1, 2, 4])
def test_a_new_lease_cannot_read_what_an_older_one_wrote(num_tokens: int) -> None:
    """The blocks of another client's finished request, with any number of tokens declared as computed."""
    slots = busy_slots()
    slots.apply(plan(retired_slots=ints(0, 1)))
    theft = plan(admissions=(admission(computed=num_tokens, blocks=(1, 2)),), row_counts=tuples(2, (2, 1)))
    slots.apply(theft)
    slots.clear()
    before = state(slots)
    with pytest.raises(PlanRejected, match=f"slot 2: block 1 counts as computed, but .* its first {num_tokens} tokens"):
        slots.apply(theft)
    for key, value in state(slots).items():
        np.testing.assert_array_equal(value, before[key], err_msg=key)


@pytest.mark.parametrize("blocks", [(), (4,)])
def test_the_tables_of_an_older_lease_are_not_taken_for_written(blocks: tuple[int, ...]) -> None:
    """A sequence whose table does not cover its computed tokens: the entries beyond it are those of another client."""
    slots = busy_slots()
    slots.clear()
    before = state(slots)
    with pytest.raises(PlanRejected, match=r"slot 0: a block table of \d is too short for 5 tokens"):
        slots.apply(plan(admissions=(Admission(0, ints(*range(6)), 5, ints(*blocks), PARAMS),)))
    for key, value in state(slots).items():
        np.testing.assert_array_equal(value, before[key], err_msg=key)


def test_the_fork_of_an_ended_sequence_counts_nothing_as_written() -> None:
    """A copy may replace what an ended sequence has written, and its fork has its table and its computed tokens."""
    slots = busy_slots()
    slots.apply(plan(block_copies=tuples(2, (8, 3)), row_counts=tuples(2, (1, 1))))
    theft = plan(admissions=(admission(3, computed=2, blocks=(3, 4)),), row_counts=tuples(2, (3, 3)))
    for change in (plan(), plan(forks=(Fork(1, 2, 7),)), plan()):
        slots.apply(change)
        with pytest.raises(PlanRejected, match="slot 3: block 3 counts as computed"):
            slots.apply(theft)


@pytest.mark.parametrize(
    ("computed", "blocks", "is_fine"),
    [
        (4, (1,), True),
        (4, (2,), False),
        (2, (2,), True),
        (3, (2,), False),
        (2, (3,), True),
        (3, (3,), False),
        (1, (9,), False),
        (0, (9,), True),
    ],
)
def test_what_a_running_sequence_has_written_may_be_shared(computed: int, blocks: tuple[int], is_fine: bool) -> None:
    """Blocks of sequences that still run count, and a partly written block counts up to where it is written."""
    for retired in ((), (0, 1)):
        slots = busy_slots()
        shared = plan(retired_slots=ints(*retired), admissions=(admission(computed=computed, blocks=blocks),))
        if is_fine:
            slots.apply(shared)
        else:
            with pytest.raises(PlanRejected, match="counts as computed"):
                slots.apply(shared)


@pytest.mark.parametrize(
    "bad",
    [
        plan(table_updates=tuples(3, (0, 0, 9))),
        plan(table_updates=tuples(3, (0, 1, 9))),
        plan(table_updates=tuples(3, (0, 1, 9)), block_copies=tuples(2, (8, 9))),
        plan(table_updates=tuples(3, (0, 0, 9)), block_copies=tuples(2, (2, 9))),
        plan(admissions=(admission(computed=4, blocks=()),), table_updates=tuples(3, (2, 0, 9), (2, 1, 8))),
    ],
    ids=["entry", "last entry", "copy of an unwritten block", "copy of a shorter block", "prefix in an update"],
)
def test_an_entry_below_the_computed_tokens_must_be_written(bad: StepPlan) -> None:
    with pytest.raises(PlanRejected, match="counts as computed, but this lease has not written"):
        busy_slots().apply(bad)


def test_a_copy_must_not_replace_what_a_sequence_attends_to() -> None:
    """A sequence of one's own, over whose block the block of an older lease is copied, is another way to read it."""
    with pytest.raises(PlanRejected, match=r"slot 0: block 1 counts as computed, but .* its first 4 tokens"):
        busy_slots().apply(plan(block_copies=tuples(2, (8, 1))))
    with pytest.raises(PlanRejected, match=r"slot 0: block 2 counts as computed, but .* its first 2 tokens"):
        busy_slots().apply(plan(block_copies=tuples(2, (8, 2)), table_updates=tuples(3, (0, 0, 1))))
    busy_slots().apply(plan(block_copies=tuples(2, (1, 2))))
    busy_slots().apply(plan(block_copies=tuples(2, (8, 1)), retired_slots=ints(0)))
    busy_slots().apply(plan(block_copies=tuples(2, (8, 2), (1, 9)), table_updates=tuples(3, (0, 1, 9))))


def test_a_copy_carries_the_mark_and_replaces_that_of_its_destination() -> None:
    slots = busy_slots()
    slots.apply(plan(table_updates=tuples(3, (0, 1, 9)), block_copies=tuples(2, (2, 9), (8, 3))))
    slots.apply(plan(admissions=(admission(2, computed=2, blocks=(9,)),)))
    with pytest.raises(PlanRejected, match="block 3 counts as computed"):
        slots.apply(plan(admissions=(admission(3, computed=1, blocks=(3,)),)))


def test_a_fork_shares_what_its_parent_wrote() -> None:
    slots = busy_slots()
    forks = (Fork(0, 3, 1),)
    slots.apply(plan(forks=forks))
    slots.advance()
    slots.fork(forks)
    slots.append(ints(0, 3), ints(41, 42))
    slots.apply(plan(retired_slots=ints(0, 3), admissions=(admission(2, computed=3, blocks=(2,)),)))
    with pytest.raises(PlanRejected, match="block 2 counts as computed"):
        slots.apply(plan(admissions=(admission(3, computed=4, blocks=(2,)),)))


class NaiveMarks:
    """Every (block, offset) that was written, as a set."""

    def __init__(self) -> None:
        self.written: set[tuple[int, int]] = set()

    def compute(self, slots: Slots) -> None:
        counters = slots.counters
        for slot in slots.computing.tolist():
            first = int(counters.num_computed_tokens[slot])
            for position in range(first, first + int(counters.row_count[slot])):
                block = int(slots.block_tables[slot, position // LIMITS.block_size])
                self.written.add((block, position % LIMITS.block_size))

    def copy(self, plan: StepPlan) -> None:
        before = set(self.written)
        for source, destination in plan.block_copies.tolist():
            self.written = {place for place in self.written if place[0] != destination}
            self.written |= {(destination, offset) for block, offset in before if block == source}

    def keeps(self, slots: Slots, plan: StepPlan) -> bool:
        """Returns whether the sequences that go on still have what they have written, after the copies."""
        marks = NaiveMarks()
        marks.written = set(self.written)
        marks.copy(plan)
        return all(
            (int(slots.block_tables[slot, position // LIMITS.block_size]), position % LIMITS.block_size)
            in marks.written
            for slot in np.flatnonzero(slots.counters.is_admitted & ~slots.counters.has_ended).tolist()
            if slot not in plan.retired_slots
            for position in range(int(slots.counters.num_computed_tokens[slot]))
        )

    def allow(self, admission: Admission, plan: StepPlan) -> bool:
        marks = NaiveMarks()
        marks.written = set(self.written)
        marks.copy(plan)
        return all(
            (int(admission.block_table[position // LIMITS.block_size]), position % LIMITS.block_size) in marks.written
            for position in range(admission.num_computed_tokens)
        )


@pytest.mark.parametrize("seed", range(20))
def test_random_plans_are_judged_as_by_a_list_of_all_written_tokens(seed: int) -> None:
    draw, slots, naive = random.Random(seed), Slots(LIMITS), NaiveMarks()
    verdicts = {True: 0, False: 0}
    for _ in range(400):
        taken = np.flatnonzero(slots.counters.is_admitted).tolist()
        retired = [slot for slot in taken if draw.random() < 0.3]
        free = [slot for slot in range(LIMITS.max_num_seqs) if slot not in taken]
        admissions, copies, counts = (), (), []
        if free:
            blocks = draw.sample(range(1, LIMITS.num_blocks), 3)
            tokens = draw.randrange(6, 12)
            new = Admission(free[0], ints(*range(tokens)), draw.choice([0, 0, *range(1, 6)]), ints(*blocks), PARAMS)
            admissions, counts = (new,), [(free[0], draw.randint(1, min(3, tokens - new.num_computed_tokens)))]
        if draw.random() < 0.3:
            copies = (tuple(draw.sample(range(1, LIMITS.num_blocks), 2)),)
        # Sequences share blocks at random here, so those that run stay within what they have.
        for slot in set(taken) - set(retired):
            left = int(slots.counters.num_tokens[slot] - slots.counters.num_computed_tokens[slot])
            counts.append((slot, min(left, draw.randrange(3))))
        step = plan(
            retired_slots=ints(*retired),
            admissions=admissions,
            block_copies=tuples(2, *copies),
            row_counts=tuples(2, *counts),
        )
        is_fine = all(naive.allow(new, step) for new in admissions) and naive.keeps(slots, step)
        verdicts[is_fine] += bool(copies) or any(new.num_computed_tokens for new in admissions)
        if not is_fine:
            with pytest.raises(PlanRejected, match="counts as computed"):
                slots.apply(step)
            continue
        slots.apply(step)
        naive.copy(step)
        naive.compute(slots)
        slots.advance()
    assert min(verdicts.values()) > 5, "both verdicts must occur"


def test_a_slot_that_begins_again_is_recorded_from_its_first_token() -> None:
    slots = busy_slots()
    slots.apply(plan(retired_slots=ints(0)))
    long = replace(PARAMS, max_total_tokens=20)
    slots.apply(plan(admissions=(admission(0, 6, blocks=(7, 8), params=long),), row_counts=tuples(2, (0, 6), (1, 0))))
    slots.advance()
    slots.apply(plan(admissions=(admission(2, 6, computed=5, blocks=(7, 8)),), row_counts=tuples(2, (0, 0))))
