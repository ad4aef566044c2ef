"""Opens the requests of one call of GenerateMany, each on behalf of the client that it names."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.logs import printable
from scheduler.core import InvalidRequest
from scheduler.identity.identity import CALLER
from scheduler.requests.status import DeadlineExceeded, RpcStatus
from scheduler.servers.access import ClientRefused
from scheduler.telemetry.request_observer import Caller

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from quire.v1 import generation_pb2 as pb
    from scheduler.identity.identity import Identity
    from scheduler.requests.intake import Intake
    from scheduler.requests.request_fields import RequestFields
    from scheduler.servers.access import Access
    from scheduler.servers.stream_of_many import StreamOfMany

METHOD = "/quire.v1.Generation/GenerateMany"

MAX_CLIENT_BYTES = 256
_AFTER_DEADLINE_S = 1.0
"""The engine ends a request at its deadline, with the output until then. Time after which the stream ends if that
output was not sent, because the stream is paused or its client reads slowly."""


@dataclass(frozen=True, slots=True)
class StreamOpener:
    """Opens the streams of one call.

    read           returns the fields of a request
    caller         makes the call; requests without credentials are its own
    peer           the network address of the caller
    counted        called once for each request, when it was admitted or refused
    authorization  credentials of the call, which are verified for each request: a key may be revoked meanwhile
    certificate    names in the certificate of a call without credentials, which are looked up for each request, too
    """

    intake: Intake
    access: Access
    read: Callable[[pb.GenerateRequest], RequestFields]
    caller: Identity
    peer: str
    counted: Callable[[], None] = lambda: None
    authorization: str | None = None
    certificate: Collection[str] = ()

    async def run(self, stream: StreamOfMany, opening: pb.OpenStream) -> None:
        """Runs a request until its stream is done. Raises the errors of `Intake.open`, and DeadlineExceeded."""
        with ExitStack() as arriving:
            arriving.callback(self.counted)
            await self._run(stream, opening, arriving)

    async def _run(self, stream: StreamOfMany, opening: pb.OpenStream, arriving: ExitStack) -> None:
        """Closes `arriving` when the request was admitted."""
        timeout_s = opening.timeout_ms / 1e3 if opening.HasField("timeout_ms") else None
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            async with asyncio.timeout(timeout_s) as limit:
                caller = await self._caller(opening)
                fields = self._fields(opening, caller)
                async with self.intake.open(fields, caller, deadline_s) as output:
                    if (ends_s := limit.when()) is not None:
                        limit.reschedule(ends_s + _AFTER_DEADLINE_S)
                    arriving.close()
                    stream.follow(output)
                    await stream.done
        except ClientRefused as error:
            client = printable(opening.client[:MAX_CLIENT_BYTES]) or self.peer
            self.access.refusals.refused(error.reason, METHOD, client, str(error))
            stream.end(RpcStatus(error.code, str(error), ()))
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlineExceeded("the request's deadline passed") from None

    async def _caller(self, opening: pb.OpenStream) -> Caller:
        """Returns the client, and makes it the caller of this task. Raises ClientRefused."""
        authorization = opening.authorization if opening.HasField("authorization") else self.authorization
        if authorization is not None:
            identity = await self.access.client(authorization)
        else:
            identity = self.access.certified_client(self.certificate) if self.certificate else self.caller
        CALLER.set(identity)
        return Caller(
            printable(opening.client[:MAX_CLIENT_BYTES]) or self.peer,
            opening.traceparent or None,
            opening.tracestate or None,
            identity.tenant,
        )

    def _fields(self, opening: pb.OpenStream, caller: Caller) -> RequestFields:
        """Raises InvalidRequest if the address of the client is too long."""
        fields = self.read(opening.request)
        if len(opening.client.encode()) > MAX_CLIENT_BYTES:
            error = InvalidRequest({"client": f"must have at most {MAX_CLIENT_BYTES} bytes"})
            self.intake.refused(fields, caller, error)
            raise error
        return fields
