"""All schedulers behind this gateway: chooses one for each request, and tells the names of the models."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from gateway.routing.choice import Prompt, make_choice
from gateway.routing.fair_line import Tenant
from gateway.routing.replicas import Replicas
from gateway.schedulers.affinity import affinity_key
from gateway.schedulers.preparation import ask_any
from gateway.schedulers.route import Route, Router
from gateway.schedulers.scheduler import Scheduler
from gateway.schedulers.stream import Caller, GenerationStream
from gateway.schedulers.tenants import KnownTenants
from gateway.schedulers.waiting import WaitingRequests
from quire.addresses import UNIX
from quire.errors import PermissionDeniedError, QuireError, UnauthenticatedError, UnavailableError
from quire.tls import TlsError, TlsFiles
from quire.tries import ServerContact

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from gateway.schedulers.watch import DigestScheme
    from quire.channel import Connection
    from quire.v1 import generation_pb2 as pb

log = logging.getLogger(__name__)

DEFAULT_POLICY = "cost"
DEFAULT_MAX_WAITING = 1024
DEFAULT_MAX_WAIT_S = 30.0

FOLLOW_INTERVAL_S = 0.5
"""Time between two looks at the addresses. A look is one `stat` of a file."""

JOIN_RETRY_S = 2.0

LEAVE_INTERVAL_S = 0.5

LATE_S = 2.0
"""Time that other schedulers have to answer at the start, once the first one has."""


class PromptReader(Protocol):
    """Reads what a choice needs to know of a prompt beyond its beginning."""

    async def read(self, request: pb.GenerateRequest, caller: Caller, schedulers: Schedulers) -> Prompt: ...


class Schedulers:
    """Opens streams. All schedulers must serve the same model.

    resume_timeout_s  time for which the gateway tries to continue a stream that broke off
    policy            one of `gateway.routing.choice.POLICIES`
    max_waiting       requests that wait while all schedulers are full, if there are several
    max_wait_s        time for which a request waits at most
    prompts           None: only the beginnings of prompts are known
    can_change        schedulers join and leave (`follow`)
    """

    def __init__(
        self,
        connections: Sequence[Connection],
        resume_timeout_s: float,
        policy: str = DEFAULT_POLICY,
        max_waiting: int = DEFAULT_MAX_WAITING,
        max_wait_s: float = DEFAULT_MAX_WAIT_S,
        prompts: PromptReader | None = None,
        *,
        can_change: bool = False,
    ) -> None:
        """Raises TlsError."""
        self._replicas = Replicas()
        self._make = partial(Scheduler, router_id=secrets.token_hex(8), on_ready=self._ready_changed)
        self._connections = {each.address: each for each in connections}
        self.all = [self._make(each, self._replicas) for each in connections]
        self._has_others = can_change or len(self.all) > 1
        self._joining: dict[str, asyncio.Task[None]] = {}
        self._leaving: dict[str, tuple[Scheduler, asyncio.Task[None]]] = {}
        self._by_address = {scheduler.address: scheduler for scheduler in self.all}
        self._router = Router(self._by_address, self._replicas, make_choice(policy, random.Random()), policy)
        self._contact = ServerContact(resume_timeout_s)
        self._prompts = prompts if self._has_others else None
        self._tenants = KnownTenants()
        self.waiting = WaitingRequests(max_waiting, max_wait_s)
        self._changed = asyncio.Event()

    @property
    def num_resumptions(self) -> int:
        """Number of times that a stream was continued after a break, or its request sent again."""
        return self._contact.num_resumptions

    @property
    def num_second_tries(self) -> int:
        """Number of times that a request was sent to another scheduler after a refusal."""
        return self._router.num_second_tries

    @property
    def chosen(self) -> Mapping[tuple[str, str], int]:
        """Number of choices, by the scheduler's address and the reason."""
        return self._router.chosen

    @property
    def is_ready(self) -> bool:
        return any(scheduler.is_ready for scheduler in self.all)

    @property
    def is_stranger(self) -> bool:
        """True if this gateway shows schedulers no identity: those that serve it would serve any client.

        At a socket file a gateway needs none, though its clients may.
        """
        return not any(
            each.api_key is not None or isinstance(each.tls, TlsFiles) or each.address.startswith(UNIX)
            for each in self._connections.values()
        )

    @property
    def info(self) -> pb.GetServerInfoResponse | None:
        """The last answer of a scheduler about its model; None if this gateway knows none."""
        return next((scheduler.info for scheduler in self.all if scheduler.info is not None), None)

    @property
    def digest_scheme(self) -> DigestScheme | None:
        """The way in which schedulers make digests of prompts; None if none of them reports any."""
        return next((each.watch.scheme for each in self.all if each.watch.is_live and each.watch.scheme), None)

    async def start(self) -> None:
        """Asks each scheduler once, and from then on once a second."""
        await asyncio.gather(*(scheduler.poll() for scheduler in self.all))
        for scheduler in self.all:
            scheduler.start(watches=self._has_others)

    async def close(self) -> None:
        self._contact.close()
        self.waiting.close()
        tasks = [*self._joining.values(), *(task for _, task in self._leaving.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        schedulers = [*self.all, *(scheduler for scheduler, _ in self._leaving.values())]
        await asyncio.gather(*(scheduler.close() for scheduler in schedulers))

    async def follow(
        self, connections: Callable[[], Sequence[Connection]], *, must_refuse_strangers: bool = False
    ) -> NoReturn:
        """Keeps the schedulers equal to `connections`, which is asked again and again. Never returns.

        must_refuse_strangers  a new scheduler that answers a call without credentials is not used
        """
        while True:
            wanted = {connection.address: connection for connection in connections()}
            for address in self._joining.keys() - wanted.keys():
                self._joining.pop(address).cancel()
            for address in wanted.keys() - self._by_address.keys() - self._joining.keys():
                joining = self._join(wanted[address], must_refuse_strangers)
                self._joining[address] = asyncio.create_task(joining, name=f"join {address}")
            self._part_from(self._by_address.keys() - wanted.keys())
            await asyncio.sleep(FOLLOW_INTERVAL_S)

    async def changed(self) -> None:
        """Waits until a scheduler becomes ready, or is not ready any more."""
        await self._changed.wait()

    async def open(self, request: pb.GenerateRequest, caller: Caller) -> GenerationStream:
        """Sends a request. Raises LimitExceededError if it is too long."""
        prompt = Prompt(affinity_key(request))
        if self._prompts is not None:
            prompt = await self._prompts.read(request, caller, self)

        async def tenant() -> Tenant:
            return await self.tenant_of(caller.authorization) or Tenant("")  # others wait together

        waiting = self.waiting if self._has_others else None
        route = Route(self._router, prompt, waiting, tenant, caller.deadline_s)
        if route.must_wait:  # others wait already, and it must not overtake them
            await route.wait()
        return GenerationStream(route, request, caller, self._contact)

    async def info_for(self, authorization: str | None) -> pb.GetServerInfoResponse:
        """Asks a scheduler for its model on behalf of a client. Raises QuireError."""
        return await self._any().info_for(authorization)

    async def tenant_of(self, authorization: str) -> Tenant | None:
        """Returns the tenant of a client; None if its credentials are not valid, or no scheduler tells this gateway."""
        return await self._tenants.find(authorization, self._any().tenant_of)

    async def tokenization(self, method: str, request: Any, authorization: str | None) -> Any:
        """Calls quire.v1.Tokenization on behalf of a client; None: of this gateway itself. Raises QuireError."""
        timeout_s = self._contact.resume_timeout_s
        return await ask_any(self._any, lambda each: each.tokenization(method, request, authorization), timeout_s)

    async def refuse_strangers(self) -> bool:
        """Returns whether all schedulers refuse a call without credentials. Waits until one has answered.

        Those that are late are used once they have answered: one that is lost must not keep the others from serving.
        """
        asking = {asyncio.create_task(_refuses_strangers(scheduler)): scheduler for scheduler in self.all}
        try:
            await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
            answered, late = await asyncio.wait(asking, timeout=LATE_S)
        finally:
            for task in asking:
                task.cancel()
        for scheduler in [asking[task] for task in late]:
            log.warning("scheduler %s does not answer: it joins when it does", scheduler.address)
            self.all.remove(scheduler)
            del self._by_address[scheduler.address]
            scheduler.leave()
            self._replicas.remove(scheduler.address)
            await scheduler.close()
            joining = self._join(self._connections[scheduler.address], must_refuse_strangers=True)
            self._joining[scheduler.address] = asyncio.create_task(joining, name=f"join {scheduler.address}")
        return all(task.result() for task in answered)

    async def _join(self, connection: Connection, must_refuse_strangers: bool) -> None:
        """Adds a scheduler. If its certificates cannot be read, which may be replaced just now, it is tried again."""
        while True:
            try:
                return await self._join_once(connection, must_refuse_strangers)
            except TlsError as error:
                log.warning("scheduler %s has not joined: %s", connection.address, error)
            await asyncio.sleep(JOIN_RETRY_S)

    async def _join_once(self, connection: Connection, must_refuse_strangers: bool) -> None:
        """Adds a scheduler. Raises TlsError.

        One that is not used because it accepts strangers is not asked again until it has left.
        """
        address = connection.address
        if must_refuse_strangers:
            unknown = self._make(connection, Replicas())  # so that it is not chosen before it has answered
            try:
                refuses = await _refuses_strangers(unknown)
            finally:
                await unknown.close()
            if not refuses:
                log.error("scheduler %s accepts calls without a key: it is not used", address)
                return
        if address in self._leaving:
            scheduler, leaving = self._leaving.pop(address)
            leaving.cancel()
        else:
            scheduler = self._make(connection, self._replicas)
        log.info("scheduler %s has joined", address)
        scheduler.start(watches=self._has_others)
        self.all.append(scheduler)
        self._by_address[address] = scheduler
        del self._joining[address]

    def _part_from(self, addresses: Collection[str]) -> None:
        """Lets schedulers leave, unless none is left. Their open streams continue until they end or break off."""
        if len(addresses) == len(self.all):
            return
        for address in addresses:
            log.info("scheduler %s has left", address)
            scheduler = self._by_address.pop(address)
            self.all.remove(scheduler)
            scheduler.leave()
            task = asyncio.create_task(self._forget_without_streams(scheduler), name=f"leave {address}")
            self._leaving[address] = (scheduler, task)

    async def _forget_without_streams(self, scheduler: Scheduler) -> None:
        """Closes a scheduler that has left when its last stream has ended."""
        while scheduler.call.num_streams:  # noqa: ASYNC110 - a stream ends in many ways, and nothing waits for this
            await asyncio.sleep(LEAVE_INTERVAL_S)
        del self._leaving[scheduler.address]
        self._replicas.remove(scheduler.address)
        self._router.forget(scheduler.address)
        await scheduler.close()

    def _ready_changed(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _any(self) -> Scheduler:
        return next((scheduler for scheduler in self.all if scheduler.is_ready), self.all[0])


async def _refuses_strangers(scheduler: Scheduler) -> bool:
    while True:
        try:
            await scheduler.info_for(None)
        except (UnauthenticatedError, PermissionDeniedError):
            return True
        except UnavailableError:
            await asyncio.sleep(0.5)
        except QuireError:
            return False
        else:
            return False
