"""Streams write at once if the queue has room, otherwise in order, in groups, and after a bounded wait."""

import asyncio
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.requests.write_queue import MAX_GROUP_S, MAX_GROUPS, MIN_GROUP, WriteQueue


class FakeLoop:
    """An event loop whose time a test advances. Nothing runs but timers, because futures have no callbacks."""

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
        self.write_queue = WriteQueue()

    def enter(self, *, is_first: bool = False) -> "asyncio.Future[int]":
        loop: Any = self.loop
        turn: asyncio.Future[int] = asyncio.Future(loop=loop)
        self.write_queue.enter(turn, is_first=is_first)
        return turn

    def enter_many(self, number: int) -> "list[asyncio.Future[int]]":
        return [self.enter() for _ in range(number)]


def num_admitted(turns: "list[asyncio.Future[int]]") -> int:
    """Returns how many streams may write, and checks that they are the first ones."""
    admitted = [turn.done() for turn in turns]
    assert admitted == sorted(admitted, reverse=True)
    return sum(admitted)


def test_streams_do_not_wait_while_there_is_room() -> None:
    rig = Rig()
    for _ in range(10 * MIN_GROUP):
        turn = rig.enter()
        assert turn.done()
        rig.write_queue.leave(turn.result())


def test_streams_that_have_written_nothing_go_first() -> None:
    rig = Rig()
    current = rig.enter_many(MIN_GROUP)
    later = rig.enter_many(MIN_GROUP)
    first = [rig.enter(is_first=True) for _ in range(3)]
    assert not any(turn.done() for turn in (*later, *first))
    for turn in current:
        rig.write_queue.leave(turn.result())
    assert all(turn.done() for turn in first)
    assert num_admitted(later) == MIN_GROUP - 3
    rig.loop.pass_time(MAX_GROUP_S)
    assert num_admitted(later) == MIN_GROUP


def test_a_stream_that_has_written_nothing_waits_no_longer_than_a_group() -> None:
    rig = Rig()
    rig.enter_many(MIN_GROUP)
    turn = rig.enter(is_first=True)
    assert not turn.done()
    rig.loop.pass_time(MAX_GROUP_S)
    assert turn.done()


def test_group_starts_when_the_previous_one_has_written() -> None:
    rig = Rig()
    turns = rig.enter_many(3 * MIN_GROUP)
    assert num_admitted(turns) == MIN_GROUP
    for turn in turns[: MIN_GROUP - 1]:
        rig.write_queue.leave(turn.result())
    assert num_admitted(turns) == MIN_GROUP
    rig.write_queue.leave(turns[MIN_GROUP - 1].result())
    assert num_admitted(turns) == 2 * MIN_GROUP


def test_stream_that_writes_again_waits_behind_the_others() -> None:
    rig = Rig()
    turns = rig.enter_many(2 * MIN_GROUP)
    rig.write_queue.leave(turns[0].result())
    again = rig.enter()
    for turn in turns[1:MIN_GROUP]:
        rig.write_queue.leave(turn.result())
    assert num_admitted([*turns, again]) == 2 * MIN_GROUP


def test_stalled_reader_delays_the_next_group_only_briefly() -> None:
    rig = Rig()
    turns = rig.enter_many(2 * MIN_GROUP)
    rig.loop.pass_time(MAX_GROUP_S)
    assert num_admitted(turns) == 2 * MIN_GROUP
    for turn in turns[:MIN_GROUP]:  # these are late: another group is writing now
        rig.write_queue.leave(turn.result())
    later = rig.enter()
    assert not later.done()
    for turn in turns[MIN_GROUP:]:
        rig.write_queue.leave(turn.result())
    assert later.done()


def test_closed_streams_do_not_count_in_a_group() -> None:
    rig = Rig()
    turns = rig.enter_many(3 * MIN_GROUP)
    for turn in turns[MIN_GROUP : 2 * MIN_GROUP]:
        turn.cancel()
    for turn in turns[:MIN_GROUP]:
        rig.write_queue.leave(turn.result())
    assert all(turn.done() and not turn.cancelled() for turn in turns[2 * MIN_GROUP :])


def test_queue_of_closed_streams_does_not_block_the_next() -> None:
    rig = Rig()
    turns = rig.enter_many(2 * MIN_GROUP)
    for turn in turns[MIN_GROUP:]:
        turn.cancel()
    for turn in turns[:MIN_GROUP]:
        rig.write_queue.leave(turn.result())
    assert rig.enter().done()


@settings(max_examples=20)
@given(num_streams=st.integers(1, 5000), stalls=st.booleans())
def test_wait_is_bounded_under_endless_overload(num_streams: int, stalls: bool) -> None:
    """Each stream that has written has new messages at once."""
    rig = Rig()
    writing = [turn for turn in rig.enter_many(num_streams - 1) if turn.done()]
    last = rig.enter()
    num_groups = 0
    while not last.done():
        waiting = list(rig.write_queue._waiting)
        if stalls and num_groups % 2:
            rig.loop.pass_time(MAX_GROUP_S)
            rig.enter_many(len(writing))
        else:
            for turn in writing:
                rig.enter()
                rig.write_queue.leave(turn.result())
        writing = [turn for turn in waiting if turn.done()]
        assert writing, "an empty group"
        num_groups += 1
    assert num_groups <= MAX_GROUPS + 2  # the size of a group is fixed before the previous one is back in the queue
