"""The exceptions for the statuses of calls that really end that way."""

import asyncio
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from quire.errors import InternalError, UnavailableError
from quire.status import from_rpc_error, is_lost_connection
from quire.tls import channel_credentials, server_credentials
from quire.v1 import generation_pb2 as pb
from quire.v1.generation_pb2_grpc import GenerationServicer, GenerationStub, add_GenerationServicer_to_server
from tests.support.certificates import Authority


class Reader(GenerationServicer):
    """Reads all requests of a call and answers none."""

    async def GenerateMany(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        async for request in request_iterator:
            if request.stream_id:
                await context.abort(grpc.StatusCode.INTERNAL, "a bug of the server")


async def end_of_call(call: Any) -> grpc.RpcError:
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.RpcError as error:
        return error
    raise AssertionError("the call has ended well")


async def test_a_server_that_ends_while_requests_are_sent_is_a_lost_connection() -> None:
    for _ in range(10):
        server = grpc.aio.server()
        add_GenerationServicer_to_server(Reader(), server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        async with grpc.aio.insecure_channel(address) as channel:
            call = GenerationStub(channel).GenerateMany()
            await call.write(pb.GenerateManyRequest())  # so that there is a connection to lose

            async def write(call: Any = call) -> None:
                with suppress(grpc.RpcError, asyncio.InvalidStateError):
                    while True:
                        await call.write(pb.GenerateManyRequest())

            writing, reading = asyncio.create_task(write()), asyncio.create_task(end_of_call(call))
            await asyncio.sleep(0.02)
            await server.stop(0)
            error = from_rpc_error(await reading)
            await writing
        assert isinstance(error, UnavailableError), error
        assert is_lost_connection(error)


async def test_a_connection_that_never_opened_is_none_that_was_lost() -> None:
    """A proxy without a server resets connections. No server has seen the request, so it is not tried for a minute."""

    async def reset(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
        writer.transport.abort()

    proxy = await asyncio.start_server(reset, "127.0.0.1", 0)
    port = proxy.sockets[0].getsockname()[1]
    async with proxy, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        error = from_rpc_error(await end_of_call(GenerationStub(channel).GenerateMany()))
    assert isinstance(error, UnavailableError), error
    assert "reset" in error.message
    assert not is_lost_connection(error)


async def test_a_bug_of_the_server_is_none() -> None:
    server = grpc.aio.server()
    add_GenerationServicer_to_server(Reader(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        call = GenerationStub(channel).GenerateMany()
        await call.write(pb.GenerateManyRequest(stream_id=1))
        error = from_rpc_error(await end_of_call(call))
    await server.stop(0)
    assert isinstance(error, InternalError)
    assert error.message == "a bug of the server"


async def test_a_certificate_with_another_name_is_no_wrong_key(tmp_path: Path) -> None:
    """Such a call is refused by gRPC itself, with the status for callers without an identity."""
    authority = Authority.create(tmp_path)
    server = grpc.aio.server()
    add_GenerationServicer_to_server(Reader(), server)
    port = server.add_secure_port("127.0.0.1:0", server_credentials(authority.issue("scheduler", "DNS:*.scheduler")))
    await server.start()
    options = [("grpc.default_authority", "scheduler-0.scheduler")]
    credentials = channel_credentials(authority.ca)
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=options) as channel:
        error = from_rpc_error(await end_of_call(GenerationStub(channel).GenerateMany()))
    await server.stop(0)
    assert isinstance(error, UnavailableError), error
    assert "certificate" in error.message
