"""Digests of blocks outlive a lease, as long as they are right, and only for a scheduler that made them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from executor.errors import PlanRejected
from executor.plans.plan import Publication, StepPlan
from executor.slots.slots import Slots
from quire.plan_stream import DIGEST_BYTES
from scheduler.core.prefix_index import PrefixIndex
from tests.support.executor.checked_plans import LIMITS, admission, plan, state
from tests.support.executor.plan_driver import ints, tuples

SCHEME = "a scheme"


def digest(number: int) -> bytes:
    return number.to_bytes(DIGEST_BYTES, "big")


def published(*blocks: int) -> Publication:
    return Publication(ints(*blocks), b"".join(digest(block) for block in blocks))


def retained(slots: Slots) -> list[tuple[int, bytes]]:
    """Returns what a lease that begins now would get."""
    found = slots._retained.all()
    assert len(found.digests) == len(found.blocks) * DIGEST_BYTES
    pieces = [found.digests[i : i + DIGEST_BYTES] for i in range(0, len(found.digests), DIGEST_BYTES)]
    return list(zip(found.blocks.tolist(), pieces, strict=True))


def written_slots(scheme: str = SCHEME) -> Slots:
    """Returns slots of which slot 0 has written 10 tokens to the blocks 1, 2 and 3 (4 + 4 + 2), and decodes."""
    slots = Slots(LIMITS)
    slots.clear(scheme)
    slots.apply(StepPlan(1, 1, admissions=(admission(0, 10, blocks=(1, 2, 3)),), row_counts=tuples(2, (0, 10))))
    slots.advance()
    slots.append(ints(0), ints(40))
    slots.apply(StepPlan(1, 2, row_counts=tuples(2, (0, 0))))
    return slots


def test_both_ends_mean_digests_of_the_same_length() -> None:
    assert PrefixIndex.DIGEST_BYTES == DIGEST_BYTES


def test_published_blocks_are_kept_in_the_order_of_publication() -> None:
    slots = written_slots()
    slots.apply(plan(published=published(2)))
    slots.apply(plan(published=published(1)))
    assert retained(slots) == [(2, digest(2)), (1, digest(1))]


def test_the_next_lease_may_attend_to_retained_blocks_and_to_no_others() -> None:
    slots = written_slots()
    slots.apply(plan(published=published(1), retired_slots=ints(0)))
    found = slots.clear(SCHEME)
    assert (found.blocks.tolist(), found.digests) == ([1], digest(1))
    before = state(slots)
    for blocks, computed in (((2,), 4), ((1, 2), 5), ((3,), 1), ((9,), 1)):
        with pytest.raises(PlanRejected, match="counts as computed, but this lease has not written"):
            slots.apply(plan(admissions=(admission(num_tokens=9, computed=computed, blocks=blocks),)))
    for key, value in state(slots).items():
        np.testing.assert_array_equal(value, before[key], err_msg=key)
    slots.apply(plan(admissions=(admission(computed=4, blocks=(1,)),)))


@pytest.mark.parametrize("scheme", ["", "another scheme"])
def test_a_lease_without_the_scheme_starts_empty_and_so_do_all_later_ones(scheme: str) -> None:
    slots = written_slots()
    slots.apply(plan(published=published(1), retired_slots=ints(0)))
    assert not slots.clear(scheme).blocks.size
    with pytest.raises(PlanRejected, match="counts as computed"):
        slots.apply(plan(admissions=(admission(computed=4, blocks=(1,)),)))
    assert not slots.clear(SCHEME).blocks.size


def test_after_a_failed_step_no_block_is_retained() -> None:
    slots = written_slots()
    slots.apply(plan(published=published(1)))
    assert not slots.clear(SCHEME, is_trusted=False).blocks.size
    assert not slots.clear(SCHEME).blocks.size


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (plan(published=published(0)), r"published_blocks: block 0 is not in \[1, 10\)"),
        (plan(published=published(10)), r"block 10 is not in \[1, 10\)"),
        (plan(published=Publication(ints(-1), digest(1))), r"block -1 is not in \[1, 10\)"),
        (plan(published=published(3)), "this lease has not written all of block 3"),
        (plan(published=published(2, 7)), "this lease has not written all of block 7"),
        (plan(published=published(2, 2)), "published_blocks: block named twice"),
        (plan(published=published(1)), "block 1 has a digest already"),
        (plan(published=Publication(ints(2), digest(2)[:-1])), "31 bytes for 1 digests of 32"),
        (plan(published=Publication(ints(2), b"")), "0 bytes for 1 digests"),
        (plan(published=Publication(ints(), digest(2))), "32 bytes for 0 digests"),
        (plan(withdrawn_blocks=ints(10)), r"withdrawn_blocks: block 10 is not in \[1, 10\)"),
        (plan(withdrawn_blocks=ints(0)), "withdrawn_blocks: block 0"),
        (plan(withdrawn_blocks=ints(1, 1)), "withdrawn_blocks: block named twice"),
        (plan(published=published(2), admissions=(admission(slot=0),)), "the slot is taken"),
    ],
)
def test_a_malformed_publication_is_refused_and_changes_nothing(bad: StepPlan, message: str) -> None:
    slots = written_slots()
    slots.apply(plan(published=published(1)))
    before, kept = state(slots), retained(slots)
    with pytest.raises(PlanRejected, match=message):
        slots.apply(bad)
    for key, value in state(slots).items():
        np.testing.assert_array_equal(value, before[key], err_msg=key)
    assert retained(slots) == kept == [(1, digest(1))]


def test_a_lease_that_names_no_scheme_publishes_nothing() -> None:
    slots = written_slots(scheme="")
    with pytest.raises(PlanRejected, match="the opening of this lease names no digest scheme"):
        slots.apply(plan(published=published(1)))


def test_withdrawn_blocks_lose_their_digests() -> None:
    slots = written_slots()
    slots.apply(plan(published=published(1, 2)))
    slots.apply(plan(withdrawn_blocks=ints(1, 5)))
    assert retained(slots) == [(2, digest(2))]
    slots.apply(plan(published=published(1)))
    assert retained(slots) == [(2, digest(2)), (1, digest(1))]


def test_a_copy_over_a_block_ends_its_digest_and_the_source_keeps_its_own() -> None:
    slots = written_slots()
    slots.apply(plan(published=published(1, 2), retired_slots=ints(0)))
    slots.apply(plan(block_copies=tuples(2, (1, 2))))
    assert retained(slots) == [(1, digest(1))]


def test_rows_end_the_digests_of_exactly_the_blocks_they_write_to() -> None:
    """Block 2 is in the table of another sequence, which will write to it, before it is published."""
    slots = written_slots()
    slots.apply(plan(admissions=(admission(2, 9, computed=4, blocks=(1, 2, 5)),)))
    slots.apply(plan(published=published(1, 2)))
    assert retained(slots) == [(1, digest(1)), (2, digest(2))]  # nothing is written yet
    slots.apply(plan(row_counts=tuples(2, (2, 5))))
    assert retained(slots) == [(1, digest(1))]


def test_a_taken_block_has_no_digest_even_if_nothing_is_written_to_it() -> None:
    """Otherwise a scheduler that has forgotten the digest could not withdraw it."""
    slots = written_slots()
    slots.apply(plan(published=published(1, 2), retired_slots=ints(0)))
    slots.apply(plan(admissions=(admission(2, 9, computed=4, blocks=(1, 2)),)))
    assert retained(slots) == [(1, digest(1))]
    slots.apply(plan(table_updates=tuples(3, (2, 2, 1))))
    assert retained(slots) == []


def test_a_block_that_is_published_and_overwritten_by_one_plan_has_no_digest() -> None:
    slots = written_slots()
    slots.apply(
        plan(
            published=published(1, 2),
            retired_slots=ints(0),
            admissions=(admission(2, 5, blocks=(2, 5)),),
            row_counts=tuples(2, (2, 5)),
        )
    )
    assert retained(slots) == [(1, digest(1))]


@pytest.mark.parametrize("seed", range(20))
def test_digests_always_say_what_blocks_hold(seed: int) -> None:
    """Random plans, whose writes are followed by a model: a version for each block that every write changes."""
    draw = random.Random(seed)
    slots = Slots(LIMITS)
    slots.clear(SCHEME)
    versions = [0] * LIMITS.num_blocks
    digests: dict[int, bytes] = {}
    running: dict[int, list[int]] = {}  # slot → table
    for _ in range(300):
        plan_of: dict[str, object] = {"retired_slots": ints()}
        if running and draw.random() < 0.5:
            slot = draw.choice(list(running))
            del running[slot]
            plan_of["retired_slots"] = ints(slot)
        full = [block for block in range(1, LIMITS.num_blocks) if versions[block] and draw.random() < 0.5]
        news = [block for block in full if block not in digests]
        plan_of["published"] = Publication(ints(*news), b"".join(digest(versions[block]) for block in news))
        gone = [block for block in digests if draw.random() < 0.1]
        plan_of["withdrawn_blocks"] = ints(*gone)
        free = [slot for slot in range(LIMITS.max_num_seqs) if slot not in running]
        writes: list[int] = []
        if free and draw.random() < 0.7:
            table = draw.sample(range(1, LIMITS.num_blocks), draw.randint(1, 3))
            num_tokens = len(table) * LIMITS.block_size
            plan_of["admissions"] = (admission(free[0], num_tokens, blocks=table),)
            plan_of["row_counts"] = tuples(2, (free[0], num_tokens))
            running[free[0]] = table
            writes = table
        for block in gone:
            digests.pop(block)
        digests |= {block: digest(versions[block]) for block in news}
        for block in writes:
            versions[block] += 1 + draw.randrange(1000)
            digests.pop(block, None)
        slots.apply(plan(**plan_of))
        slots.advance()
        slots.counters.row_count[:] = 0
        assert dict(retained(slots)) == digests
        if draw.random() < 0.05:
            slots.clear(SCHEME)
            running.clear()
            versions = [version if block in digests else 0 for block, version in enumerate(versions)]
