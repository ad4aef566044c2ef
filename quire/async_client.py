"""The asynchronous client: the same calls as in `quire.client`, on grpc.aio."""

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from quire import messages
from quire.block_map import BlockMap, PoolSummary, ServerInfo, StepTrace
from quire.channel import DEFAULT_ADDRESS, CallDefaults, Connection
from quire.errors import QuireError, RequestCancelledError, UnavailableError
from quire.events import Completion, Event, Prompt
from quire.options import GenerateOptions
from quire.status import from_rpc_error
from quire.tls import TlsFiles
from quire.tries import DEFAULT_RESUME_TIMEOUT_S, ServerContact, Tries
from quire.v1 import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc


class AsyncEventStream:
    """An iterator over the events of a request. Closing, dropping, or leaving `async with` cancels the request."""

    def __init__(self, method: Any, tries: Tries, contact: ServerContact) -> None:
        """Sends the request. `method` is that of the stub."""
        self._closed = True
        self._method = method
        self._tries = tries
        self._contact = contact
        self._wake = asyncio.Event()
        self._call = self._started_call()
        self._closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        """Returns the next event. Raises a QuireError if the request fails."""
        while not self._closed:
            try:
                message = await self._call.read()
            except grpc.RpcError as rpc_error:
                error = from_rpc_error(rpc_error)
            except asyncio.CancelledError:
                # grpc.aio raises this also when the call or its channel was closed and this task was not cancelled.
                if _task_is_being_cancelled():
                    self.close()
                    raise
                error = RequestCancelledError("the connection was closed")
            else:
                if message is grpc.aio.EOF:
                    self._closed = True
                    break
                if (event := self._tries.event(message, self.close)) is not None:
                    return event
                continue
            if not self._closed:  # otherwise another task closed it
                await self._begin_again(error)
        raise StopAsyncIteration

    def close(self) -> None:
        """Cancels the request unless it has ended; iteration then stops. May be called more than once."""
        if not self._closed:
            self._closed = True
            self._wake.set()
            self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    async def _begin_again(self, error: QuireError) -> None:
        """Waits, and sends the request for the rest of the stream. Raises the error if there is no further try."""
        try:
            pause_s = self._tries.pause_s(error)
            with self._contact.pausing(self._wake), suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()
            if not self._wake.is_set():
                self._call = self._started_call()
            elif not self._closed:
                raise RequestCancelledError("the connection was closed")
        except (QuireError, asyncio.CancelledError):
            self._closed = True
            raise

    def _started_call(self) -> Any:
        self._contact.check_open()
        request, arguments = self._tries.next_call()
        return self._method(request, **arguments)


def _task_is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class AsyncClient:
    """Calls a Quire server from one event loop. Takes the same parameters as `Client`."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout_s: float | None = None,
        wait_for_ready: bool = False,
        api_key: str | None = None,
        tls: bool | TlsFiles = False,
        ca: str | None = None,
        admin: str | None = None,
        resume_timeout_s: float = DEFAULT_RESUME_TIMEOUT_S,
    ) -> None:
        connection = Connection(address, api_key, tls, ca, admin)
        self._defaults = CallDefaults(timeout_s, wait_for_ready, api_key)
        self._admin_defaults = CallDefaults(timeout_s, wait_for_ready, connection.admin_key)
        self._channel = connection.channel(grpc.aio)
        self._generation = generation_pb2_grpc.GenerationStub(self._channel)
        self._admin_channel = connection.admin_channel(grpc.aio)
        self._address = address
        self._contact = ServerContact(resume_timeout_s)

    @property
    def num_resumptions(self) -> int:
        """Number of times that a stream of this client was continued after a break, or its request sent again."""
        return self._contact.num_resumptions

    def generate(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        wait_for_ready: bool | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncEventStream:
        """Sends the request at once and returns its events: Started, then Deltas, and Finished for each sequence.

        The options are those of `GenerateOptions`. Raises InvalidRequestError for values that cannot be sent, and
        TypeError for unknown options; iterating raises all other errors.
        """
        request = messages.generate_request(prompt, options)
        tries = Tries(request, self._defaults.arguments(timeout_s, wait_for_ready), self._contact)
        return AsyncEventStream(self._generation.Generate, tries, self._contact)

    async def complete(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        wait_for_ready: bool | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """Sends the request and returns the completion when it has ended. Cancelling the task cancels the request."""
        assembler = messages.CompletionAssembler()
        call = self.generate(prompt, timeout_s=timeout_s, wait_for_ready=wait_for_ready, **options)
        async with call as events:
            async for event in events:
                assembler.add(event)
        return assembler.completion()

    async def server_info(self, *, timeout_s: float | None = None) -> ServerInfo:
        """Returns the model, the limits and the state of the server."""
        request = generation_pb2.GetServerInfoRequest()
        return messages.server_info(
            await self._answer(self._generation.GetServerInfo, request, self._defaults.arguments(timeout_s))
        )

    async def block_map(self, *, timeout_s: float | None = None) -> BlockMap:
        """Returns the physical block pool and the running sequences."""
        return messages.block_map(await self._admin("GetBlockMap", admin_pb2.GetBlockMapRequest(), timeout_s))

    async def pool_summary(self, *, timeout_s: float | None = None) -> PoolSummary:
        """Returns the block pool in numbers."""
        request = admin_pb2.GetBlockMapRequest(summary_only=True)
        return messages.pool_summary(await self._admin("GetBlockMap", request, timeout_s))

    async def step_trace(self, after_ns: int = 0, *, timeout_s: float | None = None) -> tuple[StepTrace, ...]:
        """Returns the latest steps, oldest first, that were planned after a time of the scheduler's clock."""
        request = admin_pb2.GetStepTraceRequest(after_ns=after_ns)
        return messages.step_trace(await self._admin("GetStepTrace", request, timeout_s))

    async def drain(self, *, move_streams: bool = False, timeout_s: float | None = None) -> None:
        """Makes the server refuse new requests; returns when all admitted requests have ended.

        move_streams  gateways continue their streams at other servers now
        """
        await self._admin("Drain", admin_pb2.DrainRequest(move_streams=move_streams), timeout_s)

    async def resume(self, *, timeout_s: float | None = None) -> None:
        """Undoes `drain`: the server accepts requests again."""
        await self._admin("Resume", admin_pb2.ResumeRequest(), timeout_s)

    async def reset_prefix_cache(self, *, timeout_s: float | None = None) -> int:
        """Drops the cached prefixes that no running sequence uses; returns the number of blocks freed."""
        request = admin_pb2.ResetPrefixCacheRequest()
        reset = await self._admin("ResetPrefixCache", request, timeout_s)
        return int(reset.num_blocks)

    async def close(self) -> None:
        """Closes the connection, which cancels the requests in progress."""
        self._contact.close()
        await self._channel.close()
        if self._admin_channel is not None:
            await self._admin_channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _admin(self, method: str, request: Any, timeout_s: float | None) -> Any:
        """Calls a method at the admin address. Raises UnavailableError if that is not known."""
        if self._admin_channel is None:
            raise UnavailableError(f"the admin address of {self._address} is not known: name it")
        stub = admin_pb2_grpc.AdminStub(self._admin_channel)
        return await self._answer(getattr(stub, method), request, self._admin_defaults.arguments(timeout_s))

    async def _answer(self, method: Any, request: Any, arguments: dict[str, Any]) -> Any:
        self._contact.check_open()
        try:
            return await method(request, **arguments)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        except asyncio.CancelledError:  # also raised when the channel was closed
            if _task_is_being_cancelled():
                raise
            raise RequestCancelledError("the connection was closed") from None
