"""Tenants take turns, large tasks leave a slot to small tasks, and the sizes that wait are bounded."""

import asyncio
from collections.abc import Sequence

import pytest

from scheduler.core import QueueFull
from scheduler.text.turns import Turn, Turns


def turns_of(
    num_slots: int, *, max_size: int = 1000, max_size_of_a_tenant: int = 1000, spares_slots: bool = False
) -> Turns:
    return Turns(
        num_slots,
        large=10,
        max_size=max_size,
        max_size_of_a_tenant=max_size_of_a_tenant,
        spares_slots=spares_slots,
    )


async def order_of(turns: Turns, tasks: Sequence[tuple[str, int]]) -> list[str]:
    """Returns the tenants in the order of their turns, which one slot gives out one after the other."""
    order = []

    async def run(tenant: str, size: int) -> None:
        turn = await turns.take(tenant, size)
        order.append(tenant)
        await asyncio.sleep(0)
        turn.end()

    await asyncio.gather(*(run(tenant, size) for tenant, size in tasks))
    return order


async def test_tenants_take_turns() -> None:
    tasks = [*[("a", 1)] * 6, ("b", 1), ("c", 1), ("b", 1)]
    assert await order_of(turns_of(1), tasks) == ["a", "a", "b", "c", "a", "b", "a", "a", "a"]


async def test_large_tasks_leave_a_slot_to_small_tasks() -> None:
    turns = turns_of(2)
    large = await turns.take("a", 11)
    second = asyncio.create_task(turns.take("b", 11))
    await asyncio.sleep(0)
    small = await asyncio.wait_for(turns.take("b", 10), 30)
    small.end()
    await asyncio.sleep(0)
    assert not second.done()
    large.end()
    (await second).end()
    assert turns.size == 0


async def test_large_tasks_use_a_single_slot() -> None:
    turns = turns_of(1)
    (await turns.take("a", 11)).end()
    (await turns.take("a", 11)).end()


@pytest.mark.parametrize(("size", "num_held"), [(1, 2), (11, 1)])
async def test_a_tenant_leaves_a_slot_to_others(size: int, num_held: int) -> None:
    """Large tasks can have two of three slots, and a tenant leaves one of these, too."""
    turns = turns_of(3, spares_slots=True)
    asked = [asyncio.create_task(turns.take("a", size)) for _ in range(5)]
    await asyncio.sleep(0)
    assert sum(each.done() for each in asked) == num_held
    others = [await asyncio.wait_for(turns.take("b", size), 30)]
    for each in asked:  # each slot that is given back goes to the next task of the tenant that has too few
        (await asyncio.wait_for(each, 30)).end()
    others.append(await asyncio.wait_for(turns.take("c", size), 30))
    for turn in others:
        turn.end()
    assert turns.size == 0
    assert not turns._num_held


async def test_small_and_large_tasks_of_a_tenant_leave_a_slot_together() -> None:
    turns = turns_of(3, spares_slots=True)
    large, small = await turns.take("a", 11), await turns.take("a", 1)
    third = asyncio.create_task(turns.take("a", 1))
    await asyncio.sleep(0)
    assert not third.done()
    (await asyncio.wait_for(turns.take("b", 11), 30)).end()
    assert not third.done()
    large.end()
    (await asyncio.wait_for(third, 30)).end()
    small.end()
    assert not turns._num_held


async def test_a_task_that_is_cancelled_does_not_count_for_its_tenant() -> None:
    turns = turns_of(2, spares_slots=True)
    held = await turns.take("a", 1)
    waiting = asyncio.create_task(turns.take("a", 1))
    await asyncio.sleep(0)
    held.end()
    waiting.cancel()  # in the iteration in which it got the slot
    with pytest.raises(asyncio.CancelledError):
        await waiting
    (await asyncio.wait_for(turns.take("a", 1), 30)).end()
    assert not turns._num_held


async def test_a_single_slot_is_not_spared() -> None:
    turns = turns_of(1, spares_slots=True)
    (await asyncio.wait_for(turns.take("a", 11), 30)).end()
    (await asyncio.wait_for(turns.take("a", 1), 30)).end()


async def test_a_tenant_does_not_take_the_whole_size() -> None:
    turns = turns_of(1, max_size=30, max_size_of_a_tenant=20)
    running = await turns.take("a", 9)
    waiting = asyncio.create_task(turns.take("a", 9))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await turns.take("a", 9)
    other = asyncio.create_task(turns.take("b", 9))
    await asyncio.sleep(0)
    assert not other.done()  # it waits
    with pytest.raises(QueueFull):
        await turns.take("c", 9)
    running.end()
    running.end()  # has no effect
    (await waiting).end()
    (await other).end()
    assert turns.size == 0


@pytest.mark.parametrize("has_the_slot", [False, True])
async def test_cancelled_tasks_release_what_they_hold(has_the_slot: bool) -> None:
    turns = turns_of(1)
    first: Turn = await turns.take("a", 1)
    cancelled = asyncio.create_task(turns.take("a", 1))
    await asyncio.sleep(0)
    if has_the_slot:
        first.end()  # the slot is given to the other task, which is cancelled before it runs
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    first.end()
    assert turns.size == 0
    (await asyncio.wait_for(turns.take("b", 1), 30)).end()
