"""The certificates that docs/scale-out.md and docs/operations.md ask for have the names that clients call."""

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from gateway.schedulers.schedulers_file import read_addresses
from quire.addresses import HostPort
from quire.tls import TlsFiles, channel_credentials, server_credentials
from scheduler.engine.executor_channel import open_channel
from tests.deploy.test_compose import SERVICES
from tests.deploy.test_kubernetes import WORKLOADS
from tests.support.certificates import Authority
from tests.support.deploy.manifests import FOLDER, base
from tests.support.paths import ROOT

SCALE_OUT = (ROOT / "docs" / "scale-out.md").read_text(encoding="utf-8")
OPERATIONS = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")

Serve = Callable[..., Awaitable[int]]


def documented(secret: str) -> list[str]:
    """Returns the names of a certificate in the table of secrets."""
    row = next(line for line in SCALE_OUT.splitlines() if line.startswith(f"| `{secret}`"))
    return re.findall(r"`([^`]+)`", row.split("|")[3])


def scheduler_hosts() -> list[str]:
    """Returns the hosts that gateways call, in the base and in all overlays."""
    addresses = {each for path in FOLDER.glob("**/schedulers") for each in read_addresses(str(path))}
    return sorted(HostPort.parse(each).host for each in addresses)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.create(tmp_path_factory.mktemp("authority"))


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts a server with a certificate, and returns its port."""
    servers: list[grpc.aio.Server] = []

    async def start(files: TlsFiles, require_client: bool = False) -> int:
        server = grpc.aio.server()
        health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
        port = server.add_secure_port("127.0.0.1:0", server_credentials(files, require_client))
        await server.start()
        servers.append(server)
        return port

    yield start
    for server in servers:
        await server.stop(None)


async def check(channel: grpc.aio.Channel) -> None:
    async with channel:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=20)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING


def channel_to(port: int, authority: Authority, name: str) -> grpc.aio.Channel:
    """Returns a channel on which gRPC checks names as for this target.

    A gateway overrides no name, and `grpc.ssl_target_name_override` would leave out the check at each call.
    """
    options = [("grpc.default_authority", name)]
    return grpc.aio.secure_channel(f"127.0.0.1:{port}", channel_credentials(authority.ca), options=options)


async def test_gateways_accept_the_certificate_of_every_scheduler(serve: Serve, authority: Authority) -> None:
    files = authority.issue("scheduler", *(f"DNS:{name}" for name in documented("quire-scheduler-tls")))
    port = await serve(files)
    assert len(scheduler_hosts()) == 2
    for host in scheduler_hosts():
        await check(channel_to(port, authority, host))
    with pytest.raises(grpc.aio.AioRpcError, match="Hostname Verification"):
        await check(channel_to(port, authority, "executor.quire"))


async def test_schedulers_and_executors_accept_the_certificates_of_each_other(
    serve: Serve, authority: Authority
) -> None:
    executor = authority.issue("executor", *(f"DNS:{name}" for name in documented("quire-executor-tls")))
    scheduler = authority.issue("scheduler", *(f"DNS:{name}" for name in documented("quire-scheduler-tls")))
    port = await serve(executor, require_client=True)
    name = WORKLOADS["scheduler"].flags["--executor-name"]
    await check(open_channel(f"127.0.0.1:{port}", channel_credentials(scheduler), name))
    assert WORKLOADS["executor"].flags["--scheduler-name"] in documented("quire-scheduler-tls")


async def test_prometheus_accepts_the_certificate_of_schedulers(serve: Serve, authority: Authority) -> None:
    (monitor,) = (each for each in base() if each["kind"] == "PodMonitor")
    endpoints = monitor["spec"]["podMetricsEndpoints"]
    (name,) = (each["tlsConfig"]["serverName"] for each in endpoints if "tlsConfig" in each)
    port = await serve(authority.issue("scheduler", *(f"DNS:{each}" for each in documented("quire-scheduler-tls"))))
    context = ssl.create_default_context(cafile=authority.ca)
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)
    writer.close()


async def test_gateways_of_compose_accept_the_certificate_of_the_scheduler(serve: Serve, authority: Authority) -> None:
    line = next(line for line in OPERATIONS.splitlines() if line.startswith("* `server.pem`"))
    names = re.findall(r"`([a-z]+)`", line)
    port = await serve(authority.issue("server", *(f"DNS:{name}" for name in names)))
    (address,) = re.findall(r"--scheduler (\S+)", SERVICES["gateway"]["command"])
    await check(channel_to(port, authority, HostPort.parse(address).host))
