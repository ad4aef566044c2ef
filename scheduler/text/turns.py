"""Shares a few threads or processes among tenants."""

import asyncio
from collections import Counter, deque

from scheduler.core.errors import QueueFull

LARGE_CHARACTERS = 64 * 2**10
"""A text of more characters does not use all threads or processes."""

MAX_PENDING_CHARACTERS = 64 * 2**20
"""Most characters of all texts that one tokenizer, renderer or compiler has taken; more are refused with QueueFull."""

MAX_TENANT_PENDING_CHARACTERS = 16 * 2**20
"""The same for each tenant."""


class Turns:
    """Gives out a fixed number of slots. Used from one event loop.

    Tenants take turns (round robin). Within a tenant the order is that of arrival, but small tasks do not wait for
    large tasks. Large tasks leave one slot to small tasks, if there is more than one slot.

    num_slots              tasks that run at once
    large                  tasks of more than this size are large
    max_size               size of all tasks that run or wait; more is refused with QueueFull
    max_size_of_a_tenant   the same for each tenant, so that no tenant takes all of `max_size`
    spares_slots           no tenant takes all slots, or all that large tasks can have, unless there is only one of
                           them: the tasks of others find one free

    A single task may exceed the sizes if nothing else (of its tenant) runs or waits.
    """

    def __init__(
        self, num_slots: int, *, large: int, max_size: int, max_size_of_a_tenant: int, spares_slots: bool = False
    ) -> None:
        self._num_free = num_slots
        self._num_free_for_large = num_for_large = max(1, num_slots - 1)
        self._most_of_a_tenant = max(1, num_slots - spares_slots)
        self._most_large_of_a_tenant = max(1, num_for_large - spares_slots)
        self._num_held: Counter[tuple[str, bool]] = Counter()  # by tenant, of small and of large tasks
        self._large = large
        self._max_size = max_size
        self._max_size_of_a_tenant = max_size_of_a_tenant
        # The first queue is served next. A tenant has one for small tasks and one for large ones; no queue is empty.
        self._queues: dict[tuple[str, bool], deque[asyncio.Future[None]]] = {}
        self._sizes: Counter[str] = Counter()
        self.size = 0
        """Size of all tasks that run or wait."""

    @classmethod
    def of_texts(cls, num_slots: int, *, spares_slots: bool = False) -> "Turns":
        """Returns turns for texts, whose sizes are numbers of characters or token ids."""
        return cls(
            num_slots,
            large=LARGE_CHARACTERS,
            max_size=MAX_PENDING_CHARACTERS,
            max_size_of_a_tenant=MAX_TENANT_PENDING_CHARACTERS,
            spares_slots=spares_slots,
        )

    async def take(self, tenant: str, size: int) -> "Turn":
        """Returns when the task may run; `Turn.end` gives the slot back. Raises QueueFull if too much waits already."""
        if (self._sizes[tenant] and self._sizes[tenant] + size > self._max_size_of_a_tenant) or (
            self.size and self.size + size > self._max_size
        ):
            raise QueueFull("too much text is waiting to be tokenised, rendered or compiled")
        self._add_size(tenant, size)
        is_large = size > self._large
        may_run: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault((tenant, is_large), deque()).append(may_run)
        self._serve()
        try:
            await may_run
        except asyncio.CancelledError:
            if may_run.cancelled():
                self._add_size(tenant, -size)
            else:  # the slot was given in the same iteration of the loop
                self._give_back(tenant, size, is_large)
            raise
        return Turn(self, tenant, size, is_large)

    def _serve(self) -> None:
        while self._num_free > 0:
            key = next((key for key in self._queues if self._may_serve(*key)), None)
            if key is None:
                return
            queue = self._queues.pop(key)
            may_run = queue.popleft()
            if queue:
                self._queues[key] = queue  # behind all others
            if not may_run.done():  # its caller was not cancelled
                self._num_free -= 1
                self._num_free_for_large -= key[1]
                self._num_held[key] += 1
                may_run.set_result(None)

    def _may_serve(self, tenant: str, is_large: bool) -> bool:
        if is_large and not (
            self._num_free_for_large > 0 and self._num_held[tenant, True] < self._most_large_of_a_tenant
        ):
            return False
        return self._num_held[tenant, False] + self._num_held[tenant, True] < self._most_of_a_tenant

    def _give_back(self, tenant: str, size: int, is_large: bool) -> None:
        self._num_free += 1
        self._num_free_for_large += is_large
        self._num_held[tenant, is_large] -= 1
        if not self._num_held[tenant, is_large]:
            del self._num_held[tenant, is_large]
        self._add_size(tenant, -size)
        self._serve()

    def _add_size(self, tenant: str, size: int) -> None:
        self.size += size
        self._sizes[tenant] += size
        if not self._sizes[tenant]:
            del self._sizes[tenant]


class Turn:
    """A slot in use."""

    def __init__(self, turns: Turns, tenant: str, size: int, is_large: bool) -> None:
        self._turns = turns
        self._task = (tenant, size, is_large)
        self._has_ended = False

    def end(self) -> None:
        """Gives the slot back. Calls after the first have no effect."""
        if not self._has_ended:
            self._has_ended = True
            self._turns._give_back(*self._task)
