"""Both servers under TLS: certificates change while streams are open, and probes need no handshake."""

import asyncio
import socket
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, cast

import aiohttp
import grpc.aio
import pytest

from quire import AsyncClient, Client, PermissionDeniedError, UnauthenticatedError, UnavailableError
from quire.tls import TlsError, TlsFiles, channel_credentials
from quire.v1 import generation_pb2
from quire.v1.generation_pb2_grpc import GenerationStub
from scheduler.identity.identity import Identity, Role
from scheduler.identity.key_file import add_certificate
from scheduler.identity.verifier import Verifier
from scheduler.servers.access import Access
from scheduler.servers.http_server import HttpServer
from scheduler.telemetry.limits import NUM_LIMITED, OPEN_CONNECTIONS
from scheduler.telemetry.metrics import SchedulerMetrics
from tests.support.certificates import Authority, replace_pair
from tests.support.scheduler.callers import Callers
from tests.support.scheduler.fake_engine import FakeEngine
from tests.support.scheduler.servers import Servers
from tests.support.waiting import until

if TYPE_CHECKING:
    from scheduler.engine.engine import Engine


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.create(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def files(authority: Authority) -> TlsFiles:
    """The certificate of a server that asks clients for none."""
    issued = authority.issue_for_loopback()
    return TlsFiles(issued.certificate, issued.key)


def seen_certificate(address: str) -> str:
    """Returns the certificate that a new connection sees, in PEM."""
    host, _, port = address.rpartition(":")
    return ssl.get_server_certificate((host, int(port)), timeout=20)


def pem(path: str) -> str:
    return ssl.DER_cert_to_PEM_cert(ssl.PEM_cert_to_DER_cert(Path(path).read_text()))


@pytest.mark.parametrize("num_streams", [8, pytest.param(64, marks=pytest.mark.exhaustive)])
async def test_no_stream_breaks_when_certificates_change(
    num_streams: int, servers: Servers, authority: Authority, files: TlsFiles
) -> None:
    served = await servers.start(access=Access(tls=files))
    options = (("grpc.use_local_subchannel_pool", 1),)  # each channel has a connection of its own
    credentials = channel_credentials(authority.ca)
    channels = [grpc.aio.secure_channel(served.server.address, credentials, options) for _ in range(num_streams)]
    request = generation_pb2.GenerateRequest(text="a")
    streams = [GenerationStub(channel).Generate(request) for channel in channels]
    submitted = [(await served.engine.next_request()).start() for _ in streams]
    for stream in streams:
        assert (await stream.read()).HasField("started")

    replace_pair(files, authority.issue_for_loopback("renewed"))
    renewed = pem(files.certificate)
    assert await asyncio.to_thread(seen_certificate, served.server.address) == renewed
    Path(files.certificate).write_text("broken")  # noqa: ASYNC240
    assert await asyncio.to_thread(seen_certificate, served.server.address) == renewed

    for each in submitted:
        each.finish()
    for stream in streams:
        messages = []
        while (message := await stream.read()) is not grpc.aio.EOF:
            messages.append(message)
        assert messages[-1].HasField("finished")
        assert await stream.code() is grpc.StatusCode.OK
    for channel in channels:
        await channel.close()


async def test_the_client_library_sends_its_key_and_its_certificate(
    servers: Servers, authority: Authority, tmp_path: Path
) -> None:
    callers = Callers(tmp_path)
    access = callers.access()
    tls = authority.issue_for_loopback()
    served = await servers.start(access=Access(access.verifier, access.refusals, tls), admin_listen="127.0.0.1:0")
    client = authority.issue("client", "DNS:client.example")
    options = {"tls": client, "admin": served.server.admin_address}
    async with AsyncClient(served.server.address, api_key=callers.keys["observe"], **options) as observer:
        assert (await observer.server_info()).model_name == "tiny"
        assert (await observer.block_map()).block_size == 16
        with pytest.raises(PermissionDeniedError):
            await observer.drain()
    with Client(served.server.address, api_key=callers.keys["admin"], **options) as admin:
        assert await asyncio.to_thread(admin.reset_prefix_cache) == 9
        await asyncio.to_thread(admin.resume)
    async with AsyncClient(served.server.address, **options) as stranger:
        with pytest.raises(UnauthenticatedError):
            await stranger.server_info()
    pair = {"tls": TlsFiles(client.certificate, client.key), "ca": authority.ca}
    async with AsyncClient(served.server.address, api_key=callers.keys["observe"], **pair) as observer:
        assert (await observer.server_info()).model_name == "tiny"
    async with AsyncClient(served.server.address, ca=authority.ca) as without:
        with pytest.raises(UnavailableError):
            await without.server_info()


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


def http_server(engine: FakeEngine, access: Access) -> HttpServer:
    return HttpServer(cast("Engine", engine), SchedulerMetrics(), access=access)


async def plain(server: HttpServer, path: str) -> bytes:
    """Returns the answer to a request without TLS."""

    def send() -> bytes:
        host, _, port = server.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            try:
                return connection.recv(4096)
            except ConnectionResetError:
                return b""

    return await asyncio.to_thread(send)


async def test_http_speaks_tls_and_follows_the_certificate(
    engine: FakeEngine, authority: Authority, files: TlsFiles
) -> None:
    server = http_server(engine, Access(tls=files))
    await server.start("127.0.0.1:0")
    trusted = ssl.create_default_context(cafile=authority.ca)
    async with aiohttp.ClientSession() as session:
        async with session.get(f"https://{server.address}/readyz", ssl=trusted) as response:
            assert response.status == 200
        replace_pair(files, authority.issue_for_loopback("renewed"))
        assert await asyncio.to_thread(seen_certificate, server.address) == pem(files.certificate)
    # Liveness probes may come in clear text, so that a probe needs no certificate; nothing else may.
    assert (await plain(server, "/healthz")).startswith(b"HTTP/1.1 200 ")
    assert not (await plain(server, "/readyz")).startswith(b"HTTP/")
    await server.stop()


async def test_unfinished_handshakes_count_as_connections(
    engine: FakeEngine, files: TlsFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler.servers.http_server.max_http_connections", lambda: 2)
    server = http_server(engine, Access(tls=files))
    await server.start("127.0.0.1:0")
    host, _, port = server.address.rpartition(":")
    before = NUM_LIMITED[OPEN_CONNECTIONS]
    held = [socket.create_connection((host, int(port)), timeout=20) for _ in range(3)]
    for connection in held:
        connection.sendall(b"\x16\x03\x01")  # the beginning of a ClientHello
    await until(lambda: NUM_LIMITED[OPEN_CONNECTIONS] == before + 1)
    for connection in held:
        connection.close()
    await server.stop()


async def test_http_finds_the_caller_in_the_client_certificate(
    engine: FakeEngine, authority: Authority, tmp_path: Path
) -> None:
    callers = Callers(tmp_path)
    add_certificate(callers.path, Identity("prometheus", "ops", frozenset({Role.OBSERVE})), "prometheus.example")
    server = http_server(engine, Access(Verifier(callers.path), tls=authority.issue_for_loopback()))
    await server.start("127.0.0.1:0")
    async with aiohttp.ClientSession() as session:
        for name, expected in (("prometheus.example", 200), ("stranger.example", 401)):
            client = authority.issue("client", f"DNS:{name}")
            trusted = ssl.create_default_context(cafile=authority.ca)
            trusted.load_cert_chain(client.certificate, client.key)
            async with session.get(f"https://{server.address}/metrics", ssl=trusted) as response:
                assert response.status == expected
        without = ssl.create_default_context(cafile=authority.ca)
        with pytest.raises(aiohttp.ClientError):
            await session.get(f"https://{server.address}/metrics", ssl=without)
    await server.stop()


async def test_unusable_files_are_an_error_at_the_start(engine: FakeEngine, servers: Servers) -> None:
    access = Access(tls=TlsFiles("/absent.pem", "/absent.key"))
    with pytest.raises(TlsError, match=r"cannot read /absent\.pem"):
        http_server(engine, access)
    with pytest.raises(TlsError, match=r"cannot read /absent\.pem"):
        await servers.start(access=access)
