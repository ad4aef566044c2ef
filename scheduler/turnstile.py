"""Which stream may take its news now, when many have some at once.

A message costs its sender some 40 µs, most of it inside gRPC; the step that brought news for 500 streams would hold
the event loop for 20 ms if all of them took theirs at once, and the next result and the next plan would wait meanwhile.
So they go through one by one, in the order in which they came, a few in each turn of the loop:

    turn of the loop      │ engine, new calls, written messages … │ up to 16 streams │ engine, … │ up to 16 streams │

Whoever waits collects: when its turn comes, one message carries all that has come until then. So where time is short
there are fewer messages, not more delay at each step; and where it is not, nobody waits: the first of a turn go
through at once.
"""

import asyncio
from collections import deque

MIN_PER_TURN = 16
"""Streams let through in a turn: under a millisecond of work."""
MAX_TURNS = 32
"""Nobody waits longer, however many there are."""


class Turnstile:
    """Of one event loop, used in its thread."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._num_free = MIN_PER_TURN  # in this turn
        self._is_turning = False

    def enter(self, ticket: "asyncio.Future[None]") -> None:
        """Resolves the ticket when it is its holder's turn: now, or in a later turn of the loop."""
        if self._num_free and not self._waiting:
            self._num_free -= 1
            ticket.set_result(None)
        else:
            self._waiting.append(ticket)
        if not self._is_turning:
            self._is_turning = True
            ticket.get_loop().call_soon(self._turn, ticket.get_loop())

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        waiting = self._waiting
        if not waiting and self._num_free == MIN_PER_TURN:
            self._is_turning = False
            return
        num_places = max(MIN_PER_TURN, -(-len(waiting) // MAX_TURNS))
        num_through = min(num_places, len(waiting))
        for _ in range(num_through):
            ticket = waiting.popleft()
            if not ticket.done():  # else its holder has gone
                ticket.set_result(None)
        self._num_free = num_places - num_through
        loop.call_soon(self._turn, loop)
