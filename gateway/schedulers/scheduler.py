"""One scheduler: its channel, its shared call, and what was last heard of it."""

from __future__ import annotations

import asyncio
import logging
import time
from math import inf
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from gateway.routing.fair_line import Tenant
from gateway.routing.load import ReplicaLoad
from gateway.schedulers.shared_call import (
    REFUSED_TO_CLIENTS,
    GatewayRefused,
    SharedCall,
    error_of_own_call,
    for_clients,
)
from gateway.schedulers.watch import ReplicaWatch
from quire.errors import PermissionDeniedError, QuireError, UnauthenticatedError, UnavailableError
from quire.status import from_rpc_error, is_lost_connection
from quire.v1 import generation_pb2 as pb
from quire.v1 import replica_pb2
from quire.v1.generation_pb2_grpc import GenerationStub
from quire.v1.replica_pb2_grpc import ReplicaStub
from quire.v1.tokenization_pb2_grpc import TokenizationStub

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.routing.replicas import Replicas
    from quire.channel import Connection

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0
POLL_TIMEOUT_S = 3.0
UNARY_TIMEOUT_S = 30.0
MOVE_AFTER_S = 1.0
"""Streams wait for this long for a new executor, and then continue at another scheduler, which computes them again."""
SUSPECTS_MOVE_AFTER_S = 60.0
"""The same for a stream that was moved before and has made no progress since. Its request may be what ends executors,
which the scheduler finds out only if the stream stays."""

REFUSES = (
    "scheduler %s refuses this gateway itself, and is not ready until it accepts it: %s. The gateway's key, "
    "QUIRE_API_KEY, or its client certificate needs the role generate there"
)

ROUTER = "quire-router"
"""The metadata that names this gateway, so that a scheduler can tell it which of its requests a report contains."""


class Scheduler:
    """Asks the scheduler once a second for its state. `start` begins that.

    info      its last answer; None if it never answered
    is_ready  it serves: it is not draining, has an executor, and accepts this gateway

    watch     what it reports to routers

    replicas   where this gateway keeps what it knows of all schedulers
    router_id  names this gateway to schedulers
    on_ready   called when `is_ready` has changed
    """

    def __init__(
        self, connection: Connection, replicas: Replicas, router_id: str, on_ready: Callable[[], None]
    ) -> None:
        """Raises TlsError."""
        self._replicas = replicas
        self._router_id = router_id
        self._on_ready = on_ready
        self.address = connection.address
        self._channel = connection.channel(grpc.aio)
        key = connection.api_key
        metadata = self._own = () if key is None else (("authorization", f"Bearer {key}"),)
        generation = GenerationStub(self._channel)
        self._tokenization = TokenizationStub(self._channel)
        self._get_info: Any = generation.GetServerInfo
        replica = ReplicaStub(self._channel)
        self._identify: Any = replica.Identify
        arguments: dict[str, Any] = {"metadata": metadata}
        self._poll_arguments = arguments | {"timeout": POLL_TIMEOUT_S}
        state = replicas.add(self.address)
        self.watch = ReplicaWatch(state, replica.Watch, arguments, replicas, self._heard_load)
        self.call = SharedCall(generation.GenerateMany, (*metadata, (ROUTER, router_id)), self._broke)
        self.info: pb.GetServerInfoResponse | None = None
        self.is_ready = False
        self._refuses = False  # this gateway itself, by its own credentials
        self._polling: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._has_left = False
        self._moving: asyncio.TimerHandle | None = None  # while it has no executor
        self._suspects_move_s = inf  # a reading of time.monotonic()

    @property
    def num_known_blocks(self) -> int:
        """The number of its cached blocks that it has reported."""
        return len(self._replicas[self.address].view)

    def start(self, *, watches: bool) -> None:
        """Begins to ask for the state. `watches`: and to follow the reports for routers."""
        self._has_left = False
        self._polling = asyncio.create_task(self._poll_forever(), name=f"poll {self.address}")
        if watches and self._watching is None:
            following = self.watch.follow(self._router_id)
            self._watching = asyncio.create_task(following, name=f"watch {self.address}")

    def leave(self) -> None:
        """Makes it not ready until `start`. Open streams continue, and move if its reports ask for it."""
        self._has_left = True
        if self._polling is not None:
            self._polling.cancel()
        self._set_ready(False, "it has left")

    async def close(self) -> None:
        self.leave()
        if self._watching is not None:
            self._watching.cancel()
        self._stop_moving()
        await self.call.close()
        await self._channel.close()

    async def info_for(self, authorization: str | None) -> pb.GetServerInfoResponse:
        """Asks for the model and the state on behalf of a client. None: without any credentials. Raises QuireError."""
        # Without the header, the call would be this gateway's own; an empty one says that the client has none.
        metadata = (("authorization", authorization or ""),)
        info: pb.GetServerInfoResponse = await self._unary(self._get_info, pb.GetServerInfoRequest(), metadata)
        self._heard(info)
        return info

    async def tenant_of(self, authorization: str) -> Tenant:
        """Asks for the tenant of a client. Raises QuireError, also if this gateway's key does not allow the call."""
        request = replica_pb2.IdentifyRequest(authorization=authorization)
        try:
            answer = await self._identify(request, **self._poll_arguments)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        weight = answer.weight if 0 < answer.weight < inf else 1.0
        return Tenant(answer.tenant, weight, answer.priority)

    async def tokenization(self, method: str, request: Any, authorization: str | None) -> Any:
        """Calls a method of quire.v1.Tokenization on behalf of a client; None: of this gateway. Raises QuireError."""
        metadata = self._own if authorization is None else (("authorization", authorization),)
        try:
            return await self._unary(getattr(self._tokenization, method), request, metadata)
        except (UnauthenticatedError, PermissionDeniedError):
            if authorization is not None:
                raise
            raise UnavailableError(REFUSED_TO_CLIENTS) from None

    async def poll(self) -> None:
        """Asks for the state, and whether streams are accepted unless the open call shows it.

        A scheduler that does not answer is not ready, and neither is one that refuses this gateway.
        """
        try:
            if self._refuses or not self.call.is_open:
                await self.call.check(POLL_TIMEOUT_S)
                self._refuses = False
            try:
                # The state comes last: a report that arrives during the check would be newer.
                info = await self._get_info(pb.GetServerInfoRequest(), **self._poll_arguments)
            except grpc.RpcError as error:
                raise error_of_own_call(error) from None
        except QuireError as error:
            self._failed(error)
        else:
            self._heard(info)

    async def _unary(self, method: Any, request: Any, metadata: tuple[tuple[str, str], ...]) -> Any:
        try:
            return await method(request, timeout=UNARY_TIMEOUT_S, metadata=metadata)
        except grpc.RpcError as rpc_error:
            error = from_rpc_error(rpc_error)
            if isinstance(error, UnavailableError) and is_lost_connection(error):
                self._failed(error)  # so that the next call goes to another one
            raise for_clients(error) from None

    async def _poll_forever(self) -> None:
        while True:
            await self.poll()
            await asyncio.sleep(POLL_INTERVAL_S)

    def _heard(self, info: pb.GetServerInfoResponse) -> None:
        self.info = info
        if self._has_left:  # the answer to a client's call has come afterwards
            return
        if not self.watch.is_live:
            # Without reports, the streams of this gateway count until they end, and those of others as they were last.
            num_foreign = max(0, info.num_waiting + info.num_running - self.call.num_streams)
            self._replicas.report(self.address, ReplicaLoad(num_running=num_foreign), 0)
            if info.state == pb.SERVER_STATE_SERVING:
                self._stop_moving()  # no report may come that does
        self._set_ready(info.state == pb.SERVER_STATE_SERVING, _name(info.state))

    def _heard_load(self, load: replica_pb2.ReplicaLoad) -> None:
        self._set_ready(load.state == pb.SERVER_STATE_SERVING, _name(load.state))
        is_waiting = load.state == pb.SERVER_STATE_WAITING_FOR_EXECUTOR
        if not (is_waiting or load.moves_streams):
            self._stop_moving()
        if load.moves_streams:
            self._suspects_move_s = 0.0
            self._move_streams()
        elif is_waiting and self._moving is None:
            self._suspects_move_s = time.monotonic() + SUSPECTS_MOVE_AFTER_S
            self._move_later()

    def _move_later(self) -> None:
        if self._moving is not None:
            self._moving.cancel()
        self._moving = asyncio.get_running_loop().call_later(MOVE_AFTER_S, self._move_streams)

    def _stop_moving(self) -> None:
        if self._moving is not None:
            self._moving.cancel()
            self._moving = None

    def _move_streams(self) -> None:
        """Has the streams continue at other schedulers. If none of them is ready, tries again later."""
        self._move_later()
        if any(name != self.address for name in self._replicas.ready()):
            number = self.call.move(with_suspects=time.monotonic() >= self._suspects_move_s)
            if number:
                log.info("%d streams of scheduler %s move to others", number, self.address)

    def _broke(self, error: QuireError) -> None:
        """Called when the call has ended. The next poll says whether the scheduler can be reached again."""
        if isinstance(error, UnavailableError | GatewayRefused):
            self._failed(error)

    def _failed(self, error: QuireError) -> None:
        """Called when the scheduler cannot be used. That it refuses this gateway is logged once, until it accepts."""
        if isinstance(error, GatewayRefused) and not self._refuses:
            self._refuses = True
            log.error(REFUSES, self.address, error.message)
        self._set_ready(False, error.message)

    def _set_ready(self, is_ready: bool, why: str) -> None:
        # A report and the answer to a client's call say nothing about the first, and may come after the second.
        is_ready = is_ready and not self._refuses and not self._has_left
        if is_ready != self.is_ready:
            self.is_ready = is_ready
            self._replicas.set_ready(self.address, is_ready)
            log.info("scheduler %s is %s", self.address, "ready" if is_ready else f"not ready: {why}")
            self._on_ready()


def _name(state: pb.ServerState.ValueType) -> str:
    """Returns the name of a state, which may be one of a later version."""
    return pb.ServerState.Name(state) if state in pb.ServerState.values() else f"state {state}"
