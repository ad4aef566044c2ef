"""Decides which stream may write its messages now, if many streams have new messages at once.

A message costs its sender about 40 µs, mostly inside gRPC. If 500 streams wrote at once, the event loop would be busy
for 20 ms, and on one core the gRPC threads that receive the next result and send the next plan would have to wait.
Streams therefore write in groups, in order of arrival, and each group waits for the one before it:

    loop      │ 16 streams write │ (waits) │ result: commit, plan │ 16 streams write │ (waits) │ …
    gRPC      │                  │ written │ ────── plan ───────► │                  │ written │

A waiting stream collects its output, and writes all of it as one message when its turn comes. A busy server thus sends
fewer messages; on an idle server no stream waits. A stream that has written nothing goes before those that have: with
many streams, its first token would wait for theirs as long as for a step.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

MIN_GROUP = 16
"""Minimum number of streams in a group; they write in less than a millisecond."""
MAX_GROUPS = 32
"""Maximum number of groups that a stream waits for. Groups grow beyond MIN_GROUP to keep this bound."""
MAX_GROUP_S = 0.005
"""Time after which the next group starts, even if a reader of the current one accepts nothing."""


class WriteQueue:
    """A queue for the streams of one event loop, used in that loop's thread."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[int]] = deque()
        self._beginning: deque[asyncio.Future[int]] = deque()  # of streams that have written nothing
        self._group = 0
        self._num_free = MIN_GROUP  # streams that may still join the current group
        self._num_writing = 0  # streams of the current group
        self._timer: asyncio.TimerHandle | None = None

    def enter(self, turn: asyncio.Future[int], *, is_first: bool = False) -> None:
        """Sets the result of `turn` to a group number when the stream may write, which can be at once.

        is_first  the stream has written nothing
        """
        if self._num_free and not self._num_waiting:
            self._admit(turn)
            return
        (self._beginning if is_first else self._waiting).append(turn)
        if self._timer is None:
            self._timer = turn.get_loop().call_later(MAX_GROUP_S, self._start_next_group)

    def leave(self, group: int) -> None:
        """Called when a stream of the group has written all its messages."""
        if group == self._group:
            self._num_writing -= 1
            if not self._num_writing:
                self._start_next_group()

    def _start_next_group(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._group += 1
        self._num_writing = 0
        self._num_free = max(MIN_GROUP, -(-self._num_waiting // MAX_GROUPS))
        for waiting in (self._beginning, self._waiting):
            while waiting and self._num_free:
                self._admit(waiting.popleft())
            if waiting and self._timer is None:
                self._timer = waiting[0].get_loop().call_later(MAX_GROUP_S, self._start_next_group)

    @property
    def _num_waiting(self) -> int:
        return len(self._beginning) + len(self._waiting)

    def _admit(self, turn: asyncio.Future[int]) -> None:
        if not turn.done():  # a stream that was closed meanwhile has cancelled its turn
            self._num_free -= 1
            self._num_writing += 1
            turn.set_result(self._group)
