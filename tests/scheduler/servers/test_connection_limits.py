"""The gRPC server bounds the connections, and the streams that each may have open."""

import asyncio
import struct
from collections import Counter

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.attacks import http2
from quire.v1 import generation_pb2 as pb
from quire.v1.generation_pb2_grpc import GenerationStub
from tests.support.scheduler.servers import Servers

MAX_CONCURRENT_STREAMS = 3  # RFC 9113, 6.5.2
SETTINGS = 4


async def settings_of(address: str) -> dict[int, int]:
    """Returns the settings that a server sends at the beginning of a connection."""
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(http2.PREFACE + http2.settings())
    header = await reader.readexactly(9)
    assert header[3] == SETTINGS
    payload = await reader.readexactly(int.from_bytes(header[:3]))
    writer.close()
    return dict(struct.iter_unpack(">HI", payload))


async def test_a_connection_may_have_256_streams_open(servers: Servers) -> None:
    """Clients that open streams and cancel each at once (CVE-2023-44487) are held back by their own open streams."""
    served = await servers.start(admin_listen="127.0.0.1:0")
    for address in (served.server.address, served.server.admin_address):
        assert (await settings_of(address))[MAX_CONCURRENT_STREAMS] == 256


@pytest.mark.parametrize(("num_connections", "num_calls"), [(1, 1000), (8, 2000)])
async def test_no_call_of_a_burst_is_lost(num_connections: int, num_calls: int, servers: Servers) -> None:
    """A client makes more calls at once than a connection has streams, or than gRPC queues by default."""
    served = await servers.start()
    own = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(served.server.address, options=own) for _ in range(num_connections)]
    stubs = [GenerationStub(channel) for channel in channels]
    calls = [stubs[i % num_connections].Generate(pb.GenerateRequest(), timeout=60) for i in range(num_calls)]
    statuses = Counter(await asyncio.gather(*(call.code() for call in calls)))
    assert statuses == {grpc.StatusCode.INVALID_ARGUMENT: num_calls}, "the server has read all of them"
    for channel in channels:
        await channel.close()


async def test_grpc_connections_beyond_the_descriptors_are_closed(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler.servers.grpc_server.max_grpc_connections", lambda: 3)
    served = await servers.start()
    host, port = served.server.address.split(":")
    await health_pb2_grpc.HealthStub(served.channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
    held = [await asyncio.open_connection(host, int(port)) for _ in range(2)]  # with the one of `served`: three
    for reader, writer in held:
        writer.write(http2.PREFACE + http2.settings())
        assert (await reader.readexactly(9))[3] == SETTINGS
    reader, _ = await asyncio.open_connection(host, int(port))
    assert await reader.read() == b"", "the server has closed it"
    answer = await health_pb2_grpc.HealthStub(served.channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    for _, writer in held:
        writer.close()


async def test_admin_connections_are_few(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that they leave descriptors to the others, where the admin address is a port."""
    monkeypatch.setattr("scheduler.servers.grpc_server.MAX_ADMIN_CONNECTIONS", 2)
    served = await servers.start(admin_listen="127.0.0.1:0")
    host, port = served.server.admin_address.split(":")
    held = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
    for reader, writer in held:
        writer.write(http2.PREFACE + http2.settings())
        assert (await reader.readexactly(9))[3] == SETTINGS
    reader, _ = await asyncio.open_connection(host, int(port))
    assert await reader.read() == b"", "the server has closed it"
    for _, writer in held:
        writer.close()
