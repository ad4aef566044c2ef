"""One scheduler: its channel, its shared call, and what was last heard of it."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.schedulers.shared_call import SharedCall
from quire.errors import PermissionDeniedError, QuireError, UnauthenticatedError, UnavailableError
from quire.status import from_rpc_error
from quire.v1 import generation_pb2 as pb
from quire.v1.generation_pb2_grpc import GenerationStub
from quire.v1.tokenization_pb2_grpc import TokenizationStub

if TYPE_CHECKING:
    from quire.channel import Connection

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0
POLL_TIMEOUT_S = 3.0
UNARY_TIMEOUT_S = 30.0


class Scheduler:
    """Asks the scheduler once a second for its state. `start` begins that.

    info      its last answer; None if it never answered
    is_ready  it serves: it is not draining, and has an executor
    """

    def __init__(self, connection: Connection) -> None:
        """Raises TlsError."""
        self.address = connection.address
        self._channel = connection.channel(grpc.aio)
        key = connection.api_key
        self._metadata = () if key is None else (("authorization", f"Bearer {key}"),)
        generation = GenerationStub(self._channel)
        self._tokenization = TokenizationStub(self._channel)
        self._get_info: Any = generation.GetServerInfo
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self.call = SharedCall(generation.GenerateMany, self._metadata, self._broke)
        self.info: pb.GetServerInfoResponse | None = None
        self.is_ready = False
        self._num_foreign = 0
        self._polling: asyncio.Task[None] | None = None

    @property
    def load(self) -> int:
        """The number of streams of this gateway, and of the requests of others when they were last counted."""
        return self.call.num_streams + self._num_foreign

    def start(self) -> None:
        self._polling = asyncio.create_task(self._poll_forever(), name=f"poll {self.address}")

    async def close(self) -> None:
        if self._polling is not None:
            self._polling.cancel()
        await self.call.close()
        await self._channel.close()

    async def info_for(self, authorization: str | None) -> pb.GetServerInfoResponse:
        """Asks for the model and the state on behalf of a client. None: without any credentials. Raises QuireError."""
        info: pb.GetServerInfoResponse = await self._unary(self._get_info, pb.GetServerInfoRequest(), authorization)
        self._heard(info)
        return info

    async def tokenization(self, method: str, request: Any, authorization: str) -> Any:
        """Calls a method of quire.v1.Tokenization on behalf of a client. Raises QuireError."""
        return await self._unary(getattr(self._tokenization, method), request, authorization)

    async def poll(self) -> None:
        """Asks for the state. A scheduler that does not answer is not ready."""
        try:
            try:
                self._heard(await self._get_info(pb.GetServerInfoRequest(), **self._arguments(POLL_TIMEOUT_S)))
            except grpc.RpcError as error:
                if not isinstance(from_rpc_error(error), UnauthenticatedError | PermissionDeniedError):
                    raise
                # This gateway has no key of its own. The health can be asked for without one.
                health = await self._health.Check(health_pb2.HealthCheckRequest(), timeout=POLL_TIMEOUT_S)
                self._set_ready(health.status == health_pb2.HealthCheckResponse.SERVING, "")
        except grpc.RpcError as error:
            self._set_ready(False, from_rpc_error(error).message)

    def _arguments(self, timeout_s: float) -> dict[str, Any]:
        return {"timeout": timeout_s, "metadata": self._metadata}

    async def _unary(self, method: Any, request: Any, authorization: str | None) -> Any:
        # Without the header, the call would be this gateway's own; an empty one says that the client has none.
        metadata = (("authorization", authorization or ""),)
        try:
            return await method(request, timeout=UNARY_TIMEOUT_S, metadata=metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    async def _poll_forever(self) -> None:
        while True:
            await self.poll()
            await asyncio.sleep(POLL_INTERVAL_S)

    def _heard(self, info: pb.GetServerInfoResponse) -> None:
        self.info = info
        self._num_foreign = max(0, info.num_waiting + info.num_running - self.call.num_streams)
        state = pb.ServerState.Name(info.state)
        self._set_ready(info.state == pb.SERVER_STATE_SERVING, state)

    def _broke(self, error: QuireError) -> None:
        """Called when the call has ended. The next poll says whether the scheduler can be reached again."""
        if isinstance(error, UnavailableError):
            self._set_ready(False, error.message)

    def _set_ready(self, is_ready: bool, why: str) -> None:
        if is_ready != self.is_ready:
            self.is_ready = is_ready
            log.info("scheduler %s is %s", self.address, "ready" if is_ready else f"not ready: {why}")
