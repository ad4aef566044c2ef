"""A server of quire.v1 in the test process, on its own thread and event loop. A test scripts its answers."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as Packed
from google.rpc.error_details_pb2 import BadRequest, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from quire.addresses import default_admin_address, private_files
from quire.status_details import TRAILER
from quire.v1 import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc

Script = Callable[[generation_pb2.GenerateRequest, Any], AsyncIterator[generation_pb2.GenerateResponse]]
WAIT_S = 20.0


def started(request_id: str = "r", prompt_tokens: int = 3, cached_tokens: int = 0) -> generation_pb2.GenerateResponse:
    message = generation_pb2.Started(request_id=request_id, prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)
    return generation_pb2.GenerateResponse(started=message)


def delta(index: int, text: str, *token_ids: int) -> generation_pb2.GenerateResponse:
    return generation_pb2.GenerateResponse(delta=generation_pb2.Delta(index=index, text=text, token_ids=token_ids))


def finished(
    index: int, reason: int = generation_pb2.FINISH_REASON_EOS, **usage: int
) -> generation_pb2.GenerateResponse:
    return generation_pb2.GenerateResponse(
        finished=generation_pb2.Finished(
            index=index,
            reason=reason,  # type: ignore[arg-type]
            usage=generation_pb2.Usage(**usage),
        )
    )


def replies(*responses: generation_pb2.GenerateResponse) -> Script:
    """Returns a script that sends these responses."""

    async def script(request: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
        for response in responses:
            yield response

    return script


def refusal(
    code: grpc.StatusCode,
    message: str,
    violations: dict[str, str] | None = None,
    retry_after_s: float | None = None,
) -> Script:
    """Returns a script that refuses with this status."""

    async def script(request: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
        details = Status(code=code.value[0], message=message)
        if violations:
            listed = [BadRequest.FieldViolation(field=name, description=why) for name, why in violations.items()]
            details.details.append(_packed(BadRequest(field_violations=listed)))
        if retry_after_s is not None:
            retry = RetryInfo()
            retry.retry_delay.FromNanoseconds(round(retry_after_s * 1e9))
            details.details.append(_packed(retry))
        await context.abort(code, message, ((TRAILER, details.SerializeToString()),) if details.details else ())
        yield started()

    return script


def _packed(message: BadRequest | RetryInfo) -> Packed:
    packed = Packed()
    packed.Pack(message)
    return packed


def listen_as_admin(server: Any, address: str) -> None:
    """Adds the address at which clients of `address` look for the admin service."""
    admin_address = default_admin_address(address)
    with private_files(admin_address):
        server.add_insecure_port(admin_address)


class ScriptedServer(generation_pb2_grpc.GenerationServicer, admin_pb2_grpc.AdminServicer):
    """Answers Generate with `script`, and admin calls with its attributes. Keeps all requests in `requests`.

    options  of gRPC, in addition to its own
    """

    def __init__(self, options: tuple[tuple[str, int], ...] = ()) -> None:
        self._options = options
        self.script: Script = replies(started(), finished(0))
        self.requests: list[generation_pb2.GenerateRequest] = []
        self.time_remaining_s: list[float | None] = []
        self.cancelled = threading.Event()
        self.server_info = generation_pb2.GetServerInfoResponse(
            version="1.2.3",
            model_name="toy",
            max_model_len=256,
            vocab_size=100,
            block_size=16,
            num_blocks=63,
            max_num_seqs=8,
            max_num_batched_tokens=128,
            policy="fcfs",
            state=generation_pb2.SERVER_STATE_SERVING,
            dtype="float32",
        )
        self.block_map = admin_pb2.GetBlockMapResponse(block_size=16)
        self.num_drains = 0
        self.num_resumes = 0
        self.metadata: list[dict[str, Any]] = []
        self.address = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def start(self, address: str = "127.0.0.1:0") -> None:
        self._thread.start()
        self._await(self._start(address))

    def stop(self) -> None:
        self._await(self._server.stop(grace=None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()

    def saw_cancellation(self) -> bool:
        """Waits for a cancellation; returns False if none arrives."""
        return self.cancelled.wait(WAIT_S)

    def _await(self, coroutine: Any) -> Any:
        work: Awaitable[Any] = coroutine
        return asyncio.run_coroutine_threadsafe(_as_coroutine(work), self._loop).result(WAIT_S)

    async def _start(self, address: str) -> None:
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0), *self._options))
        generation_pb2_grpc.add_GenerationServicer_to_server(self, self._server)
        admin_pb2_grpc.add_AdminServicer_to_server(self, self._server)
        servicer = health.aio.HealthServicer()
        await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, self._server)
        port = self._server.add_insecure_port(address)
        self.address = f"127.0.0.1:{port}"
        listen_as_admin(self._server, self.address)
        await self._server.start()

    async def Generate(self, request: generation_pb2.GenerateRequest, context: Any) -> Any:  # noqa: N802
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.time_remaining_s.append(context.time_remaining())
        complete = False

        def note_end(_: Any) -> None:
            if not complete:
                self.cancelled.set()

        # Catching CancelledError is not enough: a cancellation during a write ends this generator in another way.
        context.add_done_callback(note_end)
        async for response in self.script(request, context):
            yield response
        complete = True

    async def GetServerInfo(self, request: Any, context: Any) -> generation_pb2.GetServerInfoResponse:  # noqa: N802
        return self.server_info

    async def GetBlockMap(self, request: Any, context: Any) -> admin_pb2.GetBlockMapResponse:  # noqa: N802
        return self.block_map

    async def Drain(self, request: Any, context: Any) -> admin_pb2.DrainResponse:  # noqa: N802
        self.num_drains += 1
        return admin_pb2.DrainResponse()

    async def Resume(self, request: Any, context: Any) -> admin_pb2.ResumeResponse:  # noqa: N802
        self.num_resumes += 1
        return admin_pb2.ResumeResponse()

    async def ResetPrefixCache(self, request: Any, context: Any) -> admin_pb2.ResetPrefixCacheResponse:  # noqa: N802
        return admin_pb2.ResetPrefixCacheResponse(num_blocks=5)


async def _as_coroutine(work: Awaitable[Any]) -> Any:
    return await work


async def endless(request: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
    """Starts, sends one token, and then waits for its cancellation."""
    yield started()
    yield delta(0, "a", 1)
    await asyncio.Event().wait()
