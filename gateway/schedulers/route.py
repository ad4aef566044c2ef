"""The way of one request: the schedulers that it is sent to, one after the other, and the counts of the choices."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

from gateway.routing.choice import least_uncached_tokens, num_uncached_tokens
from gateway.schedulers.waiting import GENERATED_TOKEN_COST

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from gateway.routing.choice import Choice, Prompt
    from gateway.routing.fair_line import Tenant
    from gateway.routing.replica import ReplicaState
    from gateway.routing.replicas import Replicas
    from gateway.schedulers.scheduler import Scheduler
    from gateway.schedulers.waiting import WaitingRequest, WaitingRequests
    from quire.errors import QueueFullError
    from quire.v1 import generation_pb2 as pb

REFUSED = "refused"
BROKEN = "broken"
MOVED = "moved"
NOT_READY = "not_ready"


class Router:
    """Chooses among schedulers, and counts what it has chosen.

    replicas  what is known of the schedulers, by their addresses
    chosen    number of choices, by address and reason: the policy for the first one of a request, then "refused",
              "broken" and "moved"; "not_ready" for each one while no scheduler is ready
    num_second_tries  number of choices because another scheduler has refused the request
    """

    def __init__(self, schedulers: Mapping[str, Scheduler], replicas: Replicas, choice: Choice, policy: str) -> None:
        self._schedulers = schedulers
        self.replicas = replicas
        self._choice = choice
        self._policy = policy
        self.chosen: Counter[tuple[str, str]] = Counter()
        self.num_second_tries = 0

    def choose(self, prompt: Prompt, refused: set[str], reason: str) -> Scheduler | None:
        """Returns a scheduler that is ready and has not refused the request; None if there is none."""
        name = self._choice.choose(prompt, self.replicas, refused)
        if name is None:
            return None
        self.chosen[name, reason or self._first_reason(prompt)] += 1
        self.num_second_tries += reason == REFUSED
        return self._schedulers[name]

    def home(self, prompt: Prompt) -> Scheduler:
        """Returns the scheduler that tells why none is ready."""
        name = self.replicas.ring.home(prompt.affinity_key, self._schedulers) or next(iter(self._schedulers))
        self.chosen[name, NOT_READY] += 1
        return self._schedulers[name]

    def forget(self, name: str) -> None:
        """Drops the counts of a scheduler that has left."""
        for key in [each for each in self.chosen if each[0] == name]:
            del self.chosen[key]

    def _first_reason(self, prompt: Prompt) -> str:
        return "ring" if self._policy == "cost" and prompt.num_tokens is None else self._policy


class Route:
    """Holds the scheduler of one request, and those that have refused it since its last break.

    waiting     where it waits when all are full; None: it does not wait
    tenant_of   finds the tenant for which it waits
    deadline_s  time of time.monotonic() until which it waits; None: there is no deadline
    """

    def __init__(
        self,
        router: Router,
        prompt: Prompt,
        waiting: WaitingRequests | None,
        tenant_of: Callable[[], Awaitable[Tenant]],
        deadline_s: float | None,
    ) -> None:
        self._waiting = waiting
        self._tenant_of = tenant_of
        self._deadline_s = deadline_s
        self._waits: WaitingRequest | None = None
        self._router = router
        self._prompt = prompt
        self._refused: set[str] = set()
        self._at: Scheduler | None = None
        self._state: ReplicaState | None = None
        self._number = 0
        self._has_begun = False
        self._has_token = False

    def first(self) -> Scheduler:
        """Returns the scheduler for the first try, or for the first one after a pause. It may not be ready."""
        self._refused.clear()
        reason = BROKEN if self._has_begun else ""
        self._has_begun = True
        return self._go(self._router.choose(self._prompt, self._refused, reason) or self._router.home(self._prompt))

    def next(self, *, has_moved: bool = False) -> Scheduler | None:
        """Returns another scheduler for a request that was refused or has moved; None if none other is ready."""
        if self._at is not None:
            self._refused.add(self._at.address)
        found = self._router.choose(self._prompt, self._refused, MOVED if has_moved else REFUSED)
        return None if found is None else self._go(found)

    @property
    def is_any_ready(self) -> bool:
        return bool(self._router.replicas.ready())

    @property
    def must_wait(self) -> bool:
        """True if other requests wait, or streams that have begun."""
        return self._waiting is not None and self._waiting.has_any

    @property
    def can_wait(self) -> bool:
        return self._waiting is not None

    async def wait(self, refusal: QueueFullError | None = None) -> None:
        """Waits until the request is to be tried again. Raises QueueFullError and DeadlineExceededError."""
        if self._waiting is None:
            raise RuntimeError("the request cannot wait")
        if self._waits is None:
            tenant = await self._tenant_of()
            self._waits = self._waiting.enter(tenant, least_uncached_tokens(self._prompt, self._router.replicas))
        await self._waits.turn(self._deadline_s, refusal)

    async def pause(self, most_s: float) -> None:
        """Waits before the next try of a stream that has begun: until there may be room, and `most_s` at most."""
        if self._waiting is None:
            await asyncio.sleep(most_s)
        else:
            await self._waiting.pause(most_s)

    def received(self, message: pb.GenerateResponse) -> None:
        """Counts the tokens of a message that the client has got."""
        if self._has_token and self._waits is None:  # that of nearly all messages
            return
        num_tokens = len(message.delta.token_ids)
        if num_tokens and self._number and self._state is not None and not self._has_token:
            self._has_token = True
            self._state.first_token(self._number)
        if self._waits is not None:
            self._waits.charge(GENERATED_TOKEN_COST * num_tokens)

    def not_sent(self) -> None:
        """Called if no message to the scheduler can hold the request."""
        if self._number and self._state is not None:
            self._state.not_sent(self._number)
        self._number = 0

    def left(self, *, frees_room: bool = False) -> None:
        """Called when the stream at the scheduler has ended. `frees_room`: another one may have its place."""
        if frees_room and self._number and self._waiting is not None:
            self._waiting.wake()
        if self._number and self._state is not None:
            self._state.take_back(self._number)
        self._number = 0

    def _go(self, scheduler: Scheduler) -> Scheduler:
        self.left()
        state = self._state = self._router.replicas[scheduler.address]
        self._at = scheduler
        self._has_token = False
        self._number = state.count(num_uncached_tokens(self._prompt, state), self._prompt.digests)
        return scheduler
