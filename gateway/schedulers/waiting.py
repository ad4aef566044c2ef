"""Lets requests wait while all schedulers are full, and tries them again, one after the other, when there may be room.

    refused by all ──► FairLine ──► tried again: when a stream ends, and now and then ──► refused: back to its place

A gateway cannot know how much room there is, because others may take it. So a turn is a try: one for each stream that
ends, and every quarter of a second one more, or twice as many as before while none is refused. A stream that has begun,
and has to continue at another scheduler, gets its turn before all requests of the line.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING

from gateway.routing.fair_line import FairLine, LineFull
from quire.errors import DeadlineExceededError, QueueFullError

if TYPE_CHECKING:
    from gateway.routing.fair_line import Place, Tenant

INTERVAL_S = 0.25
MAX_TRIES = 64
"""Most requests that are tried at once without a stream that has ended."""

RETRY_AFTER_S = 1.0
GENERATED_TOKEN_COST = 2
"""Service of a generated token; that of a prompt token is 1, as in schedulers."""


class WaitingRequests:
    """The requests of this gateway that wait.

    max_waiting  more are refused
    max_wait_s   a request that has waited for this long is refused
    """

    def __init__(self, max_waiting: int, max_wait_s: float) -> None:
        self._line = FairLine(max_waiting)
        self._max_wait_s = max_wait_s
        self._turns: dict[Place, asyncio.Future[None]] = {}
        self._begun: deque[asyncio.Future[None]] = deque()  # turns of streams that have begun
        self._num_tries = 1
        self._was_refused = False
        self._timer: asyncio.TimerHandle | None = None
        self.num_waited = 0
        """Requests that have waited, or wait."""

    def __len__(self) -> int:
        return len(self._line)

    @property
    def has_any(self) -> bool:
        """True if a request waits, or a stream that has begun."""
        return bool(self._begun) or len(self._line) > 0

    def enter(self, tenant: Tenant, num_tokens: int) -> WaitingRequest:
        """Adds a request that computes `num_tokens` tokens of its prompt. Raises QueueFullError if the line is full."""
        try:
            place = self._line.enter(tenant, num_tokens)
        except LineFull:
            message = f"all schedulers are full, and {len(self._line)} requests wait at the gateway"
            raise QueueFullError(message, RETRY_AFTER_S) from None
        self.num_waited += 1
        return WaitingRequest(self, place, time.monotonic() + self._max_wait_s)

    def wake(self, number: int = 1) -> None:
        """Gives turns to the next streams and requests. Called when a stream has ended, and by the timer."""
        while number:
            if self._begun:
                turn = self._begun.popleft()
            elif (place := self._line.take()) is not None:
                turn = self._turns.pop(place)
                if turn.done():  # its client has just gone, or its time has passed
                    self._line.charge(place.tenant, -place.cost)
            else:
                return
            if not turn.done():
                turn.set_result(None)
                number -= 1

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def charge(self, tenant: Tenant, service: float) -> None:
        self._line.charge(tenant, service)

    async def pause(self, most_s: float) -> None:
        """Waits for the turn of a stream that has begun and was refused, `most_s` at most."""
        turn = asyncio.get_running_loop().create_future()
        self._begun.append(turn)
        try:
            async with asyncio.timeout(most_s):
                await turn
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.wake()  # the turn was for nothing
            raise
        finally:
            if turn in self._begun:
                self._begun.remove(turn)

    async def turn(self, place: Place, until_s: float, *, comes_back: bool) -> bool:
        """Waits for the turn of a request. Returns False if it has not come until then."""
        if comes_back:
            self._line.put_back(place)
            self._was_refused = True
        turn = self._turns[place] = asyncio.get_running_loop().create_future()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._try)
        try:
            async with asyncio.timeout(max(0.0, until_s - time.monotonic())):
                await turn
        except (TimeoutError, asyncio.CancelledError) as error:
            if turn.done() and not turn.cancelled():  # the turn was for nothing
                self._line.charge(place.tenant, -place.cost)
                self.wake()
            if isinstance(error, TimeoutError):
                return False
            raise
        finally:
            self._line.leave(place)
            self._turns.pop(place, None)
        return True

    def _try(self) -> None:
        self._timer = None
        if not len(self._line):
            self._num_tries = 1
            return
        self._num_tries = 1 if self._was_refused else min(MAX_TRIES, 2 * self._num_tries)
        self._was_refused = False
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._try)
        self.wake(self._num_tries)


class WaitingRequest:
    """One request that waits, is tried, and may wait again at the same place."""

    def __init__(self, waiting: WaitingRequests, place: Place, until_s: float) -> None:
        self._waiting = waiting
        self._place = place
        self._until_s = until_s
        self._was_tried = False

    async def turn(self, deadline_s: float | None, refusal: QueueFullError | None) -> None:
        """Returns when the request is to be tried. Raises `refusal` or DeadlineExceededError if that takes too long."""
        until_s = self._until_s if deadline_s is None else min(deadline_s, self._until_s)
        comes_back, self._was_tried = self._was_tried, True
        if await self._waiting.turn(self._place, until_s, comes_back=comes_back):
            return
        if deadline_s is not None and time.monotonic() >= deadline_s:
            raise DeadlineExceededError("the deadline passed while all schedulers were full")
        raise refusal or QueueFullError("all schedulers are full", RETRY_AFTER_S)

    def charge(self, service: float) -> None:
        """Counts service that the request has received, beside that of its prompt."""
        self._waiting.charge(self._place.tenant, service)
