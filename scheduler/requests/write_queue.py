"""Which stream may take its news now, when many have some at once.

A message costs its sender some 40 µs, most of it inside gRPC. If all of 500 streams took theirs at once, the event loop
would be busy for 20 ms, and with it the threads of gRPC that bring the next result and carry the next plan: on one core
they get their turn when the loop has nothing to do. So streams go through in groups, in the order in which they came,
and a group goes when the one before it is done:

    loop      │ 16 streams write │ (waits) │ result: commit, plan │ 16 streams write │ (waits) │ …
    gRPC      │                  │ written │ ────── plan ───────► │                  │ written │

Whoever waits collects: when its turn comes, one message carries all that has come until then. So where time is short
there are fewer messages; and where it is not, nobody waits.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

MIN_GROUP = 16
"""Streams in a group: under a millisecond of work."""
MAX_GROUPS = 32
"""Groups are larger when about this many would not hold all that wait."""
MAX_GROUP_S = 0.005
"""A group that has not ended by then holds a reader that takes nothing: the next one goes."""


class Turnstile:
    """Of one event loop, used in its thread."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[int]] = deque()
        self._group = 0
        self._num_places = MIN_GROUP  # left in this group
        self._num_inside = 0  # of this group
        self._timer: asyncio.TimerHandle | None = None

    def enter(self, ticket: asyncio.Future[int]) -> None:
        """Resolves the ticket, with the number of its group, when it is its holder's turn: that may be now."""
        if self._num_places and not self._waiting:
            self._let_through(ticket)
            return
        self._waiting.append(ticket)
        if self._timer is None:
            self._timer = ticket.get_loop().call_later(MAX_GROUP_S, self._next_group)

    def leave(self, group: int) -> None:
        """A stream of this group has written what it had."""
        if group == self._group:
            self._num_inside -= 1
            if not self._num_inside:
                self._next_group()

    def _next_group(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._group += 1
        self._num_inside = 0
        self._num_places = max(MIN_GROUP, -(-len(self._waiting) // MAX_GROUPS))
        while self._waiting and self._num_places:
            self._let_through(self._waiting.popleft())
        if self._waiting:
            self._timer = self._waiting[0].get_loop().call_later(MAX_GROUP_S, self._next_group)

    def _let_through(self, ticket: asyncio.Future[int]) -> None:
        if not ticket.done():  # else its holder has gone
            self._num_places -= 1
            self._num_inside += 1
            ticket.set_result(self._group)
