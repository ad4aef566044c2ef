"""All schedulers behind this gateway: chooses one for each request, and tells the names of the models."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from gateway.schedulers.ring import Ring, affinity_key
from gateway.schedulers.scheduler import Scheduler
from gateway.schedulers.stream import Caller, GenerationStream
from quire.errors import UnavailableError
from quire.tries import ServerContact

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from gateway.schedulers.shared_call import SharedCall
    from gateway.schedulers.stream import Line
    from quire.channel import Connection
    from quire.v1 import generation_pb2 as pb


class Schedulers:
    """Opens streams. All schedulers must serve the same model.

    resume_timeout_s  time for which a stream that broke off is tried to continue
    num_second_tries  number of times that a request was sent to another scheduler after a refusal
    """

    def __init__(self, connections: Sequence[Connection], resume_timeout_s: float) -> None:
        """Raises TlsError."""
        self.all = [Scheduler(connection) for connection in connections]
        self._by_address = {scheduler.address: scheduler for scheduler in self.all}
        self._ring = Ring(list(self._by_address))
        self._contact = ServerContact(resume_timeout_s)
        self.num_second_tries = 0

    @property
    def num_resumptions(self) -> int:
        """Number of times that a stream was continued after a break, or its request sent again."""
        return self._contact.num_resumptions

    @property
    def is_ready(self) -> bool:
        return any(scheduler.is_ready for scheduler in self.all)

    @property
    def info(self) -> pb.GetServerInfoResponse | None:
        """The last answer of a scheduler about its model; None if this gateway knows none."""
        return next((scheduler.info for scheduler in self.all if scheduler.info is not None), None)

    async def start(self) -> None:
        """Asks each scheduler once, and from then on once a second."""
        await asyncio.gather(*(scheduler.poll() for scheduler in self.all))
        for scheduler in self.all:
            scheduler.start()

    async def close(self) -> None:
        self._contact.close()
        await asyncio.gather(*(scheduler.close() for scheduler in self.all))

    def open(self, request: pb.GenerateRequest, caller: Caller) -> GenerationStream:
        """Sends a request. Raises LimitExceededError if it is too long."""
        return GenerationStream(self, request, caller, self._contact)

    def choose(self, request: pb.GenerateRequest) -> SharedCall:
        """Returns the call for a request. If no scheduler is ready, the attempt says why."""
        if len(self.all) == 1:
            return self.all[0].call
        return self._nearest(request, [scheduler for scheduler in self.all if scheduler.is_ready] or self.all)

    def other(self, request: pb.GenerateRequest, refused: Collection[Line]) -> SharedCall | None:
        """Returns the call to a scheduler that is ready and none of those that have refused; None if there is none.

        It counts as a second try.
        """
        ready = [scheduler for scheduler in self.all if scheduler.is_ready and scheduler.call not in refused]
        self.num_second_tries += bool(ready)
        return self._nearest(request, ready) if ready else None

    def _nearest(self, request: pb.GenerateRequest, candidates: Sequence[Scheduler]) -> SharedCall:
        name = self._ring.choose(affinity_key(request), {each.address: each.load for each in candidates})
        return self._by_address[name].call

    async def info_for(self, authorization: str | None) -> pb.GetServerInfoResponse:
        """Asks a scheduler for its model on behalf of a client. Raises QuireError."""
        return await self._any().info_for(authorization)

    async def tokenization(self, method: str, request: Any, authorization: str) -> Any:
        """Calls quire.v1.Tokenization on behalf of a client. Raises QuireError."""
        return await self._any().tokenization(method, request, authorization)

    async def refuse_strangers(self) -> bool:
        """Returns whether all schedulers refuse a call without credentials. Waits until each has answered."""
        return all(await asyncio.gather(*map(_refuses_strangers, self.all)))

    def _any(self) -> Scheduler:
        return next((scheduler for scheduler in self.all if scheduler.is_ready), self.all[0])


async def _refuses_strangers(scheduler: Scheduler) -> bool:
    from quire.errors import PermissionDeniedError, QuireError, UnauthenticatedError

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
