"""Who goes through the turnstile when: at once if there is room, else in order, in groups, and never too late."""

import asyncio
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.requests.write_queue import MAX_GROUP_S, MAX_GROUPS, MIN_GROUP, Turnstile


class FakeLoop:
    """A clock that a test moves. Futures have no callbacks: nothing else runs."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.timers: list[FakeTimer] = []

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> "FakeTimer":
        self.timers.append(FakeTimer(self.now_s + delay_s, callback))
        return self.timers[-1]

    def get_debug(self) -> bool:
        return False

    def pass_time(self, duration_s: float) -> None:
        self.now_s += duration_s
        due = [timer for timer in self.timers if timer.due_s <= self.now_s]
        self.timers = [timer for timer in self.timers if timer.due_s > self.now_s]
        for timer in due:
            if not timer.is_cancelled:
                timer.callback()


class FakeTimer:
    def __init__(self, due_s: float, callback: Callable[[], None]) -> None:
        self.due_s = due_s
        self.callback = callback
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Rig:
    def __init__(self) -> None:
        self.loop = FakeLoop()
        self.turnstile = Turnstile()

    def enter(self) -> "asyncio.Future[int]":
        loop: Any = self.loop
        ticket: asyncio.Future[int] = asyncio.Future(loop=loop)
        self.turnstile.enter(ticket)
        return ticket

    def enter_many(self, number: int) -> "list[asyncio.Future[int]]":
        return [self.enter() for _ in range(number)]


def num_through(tickets: "list[asyncio.Future[int]]") -> int:
    """All of the first ones, none of the others."""
    through = [ticket.done() for ticket in tickets]
    assert through == sorted(through, reverse=True)
    return sum(through)


def test_nobody_waits_while_there_is_room() -> None:
    rig = Rig()
    for _ in range(10 * MIN_GROUP):
        ticket = rig.enter()
        assert ticket.done()
        rig.turnstile.leave(ticket.result())


def test_a_group_goes_when_the_one_before_it_is_done() -> None:
    rig = Rig()
    tickets = rig.enter_many(3 * MIN_GROUP)
    assert num_through(tickets) == MIN_GROUP
    for ticket in tickets[: MIN_GROUP - 1]:
        rig.turnstile.leave(ticket.result())
    assert num_through(tickets) == MIN_GROUP
    rig.turnstile.leave(tickets[MIN_GROUP - 1].result())
    assert num_through(tickets) == 2 * MIN_GROUP


def test_who_has_written_queues_up_again_behind_the_others() -> None:
    rig = Rig()
    tickets = rig.enter_many(2 * MIN_GROUP)
    rig.turnstile.leave(tickets[0].result())
    again = rig.enter()
    for ticket in tickets[1:MIN_GROUP]:
        rig.turnstile.leave(ticket.result())
    assert num_through([*tickets, again]) == 2 * MIN_GROUP


def test_a_reader_that_takes_nothing_holds_the_others_up_but_shortly() -> None:
    rig = Rig()
    tickets = rig.enter_many(2 * MIN_GROUP)
    rig.loop.pass_time(MAX_GROUP_S)
    assert num_through(tickets) == 2 * MIN_GROUP
    for ticket in tickets[:MIN_GROUP]:  # late: they are not of the group that is inside
        rig.turnstile.leave(ticket.result())
    later = rig.enter()
    assert not later.done()
    for ticket in tickets[MIN_GROUP:]:
        rig.turnstile.leave(ticket.result())
    assert later.done()


def test_who_has_gone_takes_no_place() -> None:
    rig = Rig()
    tickets = rig.enter_many(3 * MIN_GROUP)
    for ticket in tickets[MIN_GROUP : 2 * MIN_GROUP]:
        ticket.cancel()
    for ticket in tickets[:MIN_GROUP]:
        rig.turnstile.leave(ticket.result())
    assert all(ticket.done() and not ticket.cancelled() for ticket in tickets[2 * MIN_GROUP :])


def test_a_queue_of_those_who_have_gone_blocks_nobody() -> None:
    rig = Rig()
    tickets = rig.enter_many(2 * MIN_GROUP)
    for ticket in tickets[MIN_GROUP:]:
        ticket.cancel()
    for ticket in tickets[:MIN_GROUP]:
        rig.turnstile.leave(ticket.result())
    assert rig.enter().done()


@settings(max_examples=20, deadline=None)
@given(num_streams=st.integers(1, 5000), stalls=st.booleans())
def test_however_many_come_back_at_once_nobody_waits_for_long(num_streams: int, stalls: bool) -> None:
    """Overload without an end: whoever has written has news again at once. The wait is bounded all the same."""
    rig = Rig()
    inside = [ticket for ticket in rig.enter_many(num_streams - 1) if ticket.done()]
    last = rig.enter()
    num_groups = 0
    while not last.done():
        waiting = list(rig.turnstile._waiting)
        if stalls and num_groups % 2:
            rig.loop.pass_time(MAX_GROUP_S)
            rig.enter_many(len(inside))
        else:
            for ticket in inside:
                rig.enter()
                rig.turnstile.leave(ticket.result())
        inside = [ticket for ticket in waiting if ticket.done()]
        assert inside, "a group of none"
        num_groups += 1
    assert num_groups <= MAX_GROUPS + 2  # a group is cut while the one before it is not back in the queue
