"""The synchronous client."""

import threading
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


class EventStream:
    """An iterator over the events of a request. Closing, dropping, or leaving `with` cancels the request."""

    def __init__(self, method: Any, tries: Tries, contact: ServerContact) -> None:
        """Sends the request. `method` is that of the stub."""
        self._closed = True
        self._method = method
        self._tries = tries
        self._contact = contact
        self._wake = threading.Event()
        self._call = self._started_call()
        self._closed = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        """Returns the next event. Raises a QuireError if the request fails."""
        while not self._closed:
            try:
                message = next(self._call)
            except StopIteration:
                self._closed = True
                raise
            except grpc.RpcError as rpc_error:
                error = from_rpc_error(rpc_error)
            else:
                if (event := self._tries.event(message, self.close)) is not None:
                    return event
                continue
            if not self._closed:  # otherwise another thread closed it
                self._begin_again(error)
        raise StopIteration

    def close(self) -> None:
        """Cancels the request unless it has ended; iteration then stops. Any thread may call it, more than once."""
        if not self._closed:
            self._closed = True
            self._wake.set()
            self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _begin_again(self, error: QuireError) -> None:
        """Waits, and sends the request for the rest of the stream. Raises the error if there is no further try."""
        try:
            pause_s = self._tries.pause_s(error)
            with self._contact.pausing(self._wake):
                is_woken = self._wake.wait(pause_s)
            if not is_woken:
                self._call = self._started_call()
            elif not self._closed:
                raise RequestCancelledError("the connection was closed")
        except QuireError:
            self._closed = True
            raise
        if self._closed:  # another thread closed it, and may have cancelled the previous call
            self._call.cancel()

    def _started_call(self) -> Any:
        request, arguments = self._tries.next_call()
        try:
            return self._method(request, **arguments)
        except ValueError:
            self._contact.check_open()
            raise


class Client:
    """Calls a Quire server. Safe to use from several threads.

    If the server is lost or drained, streams continue with the server that answers next: no token is repeated or
    missing. For this, a stream keeps 4 bytes for each token until it ends.

    address           "host:port" or "unix:path" of the scheduler
    timeout_s         deadline of each call that does not set its own, all its tries together; None: no deadline
    wait_for_ready    True: calls wait for a server that cannot be reached yet (within the deadline); False: they
                      fail at once with UnavailableError if this client has never had an answer
    api_key           key or token that the server asks for (`quire keys add`); None: nothing is sent
    tls               True: connect with TLS; TlsFiles: with a client certificate as well
    ca                PEM file of the authorities that sign the server's certificate; with it, TLS is on
    admin             address of the admin service, which block_map, pool_summary, step_trace, drain, resume and
                      reset_prefix_cache call; None: the default of a server of this user on this machine
    resume_timeout_s  a stream that broke off fails with UnavailableError if no server has continued it after this time;
                      0: it fails at once
    """

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
        self._channel = connection.channel(grpc)
        self._generation = generation_pb2_grpc.GenerationStub(self._channel)
        self._admin_channel = connection.admin_channel(grpc)
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
    ) -> EventStream:
        """Sends the request at once and returns its events: Started, then Deltas, and Finished for each sequence.

        The options are those of `GenerateOptions`. Raises InvalidRequestError for values that cannot be sent, and
        TypeError for unknown options; iterating raises all other errors.
        """
        request = messages.generate_request(prompt, options)
        tries = Tries(request, self._defaults.arguments(timeout_s, wait_for_ready), self._contact)
        return EventStream(self._generation.Generate, tries, self._contact)

    def complete(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        wait_for_ready: bool | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Completion:
        """Sends the request and returns the completion when it has ended."""
        assembler = messages.CompletionAssembler()
        with self.generate(prompt, timeout_s=timeout_s, wait_for_ready=wait_for_ready, **options) as events:
            for event in events:
                assembler.add(event)
        return assembler.completion()

    def server_info(self, *, timeout_s: float | None = None) -> ServerInfo:
        """Returns the model, the limits and the state of the server."""
        request = generation_pb2.GetServerInfoRequest()
        return messages.server_info(
            self._answer(self._generation.GetServerInfo, request, self._defaults.arguments(timeout_s))
        )

    def block_map(self, *, timeout_s: float | None = None) -> BlockMap:
        """Returns the physical block pool and the running sequences."""
        return messages.block_map(self._admin("GetBlockMap", admin_pb2.GetBlockMapRequest(), timeout_s))

    def pool_summary(self, *, timeout_s: float | None = None) -> PoolSummary:
        """Returns the block pool in numbers."""
        request = admin_pb2.GetBlockMapRequest(summary_only=True)
        return messages.pool_summary(self._admin("GetBlockMap", request, timeout_s))

    def step_trace(self, after_ns: int = 0, *, timeout_s: float | None = None) -> tuple[StepTrace, ...]:
        """Returns the latest steps, oldest first, that were planned after a time of the scheduler's clock."""
        request = admin_pb2.GetStepTraceRequest(after_ns=after_ns)
        return messages.step_trace(self._admin("GetStepTrace", request, timeout_s))

    def drain(self, *, move_streams: bool = False, timeout_s: float | None = None) -> None:
        """Makes the server refuse new requests; returns when all admitted requests have ended.

        move_streams  gateways continue their streams at other servers now
        """
        self._admin("Drain", admin_pb2.DrainRequest(move_streams=move_streams), timeout_s)

    def resume(self, *, timeout_s: float | None = None) -> None:
        """Undoes `drain`: the server accepts requests again."""
        self._admin("Resume", admin_pb2.ResumeRequest(), timeout_s)

    def reset_prefix_cache(self, *, timeout_s: float | None = None) -> int:
        """Drops the cached prefixes that no running sequence uses; returns the number of blocks freed."""
        reset = self._admin("ResetPrefixCache", admin_pb2.ResetPrefixCacheRequest(), timeout_s)
        return int(reset.num_blocks)

    def close(self) -> None:
        """Closes the connection, which cancels the requests in progress."""
        self._contact.close()
        self._channel.close()
        if self._admin_channel is not None:
            self._admin_channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _admin(self, method: str, request: Any, timeout_s: float | None) -> Any:
        """Calls a method at the admin address. Raises UnavailableError if that is not known."""
        if self._admin_channel is None:
            raise UnavailableError(f"the admin address of {self._address} is not known: name it")
        stub = admin_pb2_grpc.AdminStub(self._admin_channel)
        return self._answer(getattr(stub, method), request, self._admin_defaults.arguments(timeout_s))

    def _answer(self, method: Any, request: Any, arguments: dict[str, Any]) -> Any:
        try:
            return method(request, **arguments)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        except ValueError:
            self._contact.check_open()
            raise
