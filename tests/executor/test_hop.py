"""Access to the executor: through a socket file of its user, or with the certificate of the right scheduler."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc

from executor.errors import ConfigError
from executor.server import Server
from quire.addresses import AddressUnusable, private_files, private_socket
from quire.executor.v1 import executor_pb2 as pb
from quire.executor.v1.executor_pb2_grpc import ExecutorStub
from quire.tls import TlsFiles, channel_credentials
from scheduler.core import ExecutorLost, ExecutorNotOurs
from scheduler.engine.executor_client import ExecutorClient
from tests.support.certificates import Authority, replace_pair
from tests.support.executor.fake_runner import FakeRunner, loaded
from tests.support.executor.served import CONFIG, open_stream, status

if TYPE_CHECKING:
    from pathlib import Path

SCHEDULER = "scheduler.quire.test"
EXECUTOR = "executor.quire.test"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.create(tmp_path_factory.mktemp("authority"))


def tls_config(files: TlsFiles):
    names = {"tls_certificate": files.certificate, "tls_key": files.key, "tls_client_ca": files.ca}
    return replace(CONFIG, **names, scheduler_name=SCHEDULER)


@pytest.fixture
async def tls_server(authority: Authority):
    server = Server(tls_config(authority.issue("executor", f"DNS:{EXECUTOR}")), loaded(FakeRunner()))
    server.address = await server.start()
    yield server
    await server.stop()


def secure_channel(server: Server, files: TlsFiles | str) -> grpc.aio.Channel:
    options = [("grpc.ssl_target_name_override", EXECUTOR)]
    return grpc.aio.secure_channel(server.address, channel_credentials(files), options=options)


async def refused(stub: ExecutorStub) -> list[grpc.StatusCode]:
    """Returns the status codes of a `Describe` and of a `Run`, neither of which may succeed."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.Describe(pb.DescribeRequest(), timeout=10)
    # Nothing is written: gRPC's client reports a call that is refused during a write as INTERNAL.
    return [error.value.code(), (await status(stub.Run(timeout=10)))[0]]


async def test_the_scheduler_that_the_executor_names_is_served(tls_server: Server, authority: Authority) -> None:
    files = authority.issue("scheduler", f"DNS:{SCHEDULER}")
    client = ExecutorClient(tls_server.address, tls=files, executor_name=EXECUTOR)
    description = await client.describe(10)
    stream = await client.open_stream(lambda: None, 1, description.incarnation, 10)
    assert stream.lease == 1
    await stream.close()
    await client.close()


@pytest.mark.parametrize("number", [20, pytest.param(1000, marks=pytest.mark.exhaustive)])
async def test_no_caller_without_a_certificate_is_served(
    tls_server: Server, authority: Authority, tmp_path: Path, number: int
) -> None:
    forged = Authority.create(tmp_path, "another authority").issue("forged", f"DNS:{SCHEDULER}")
    codes: Counter[grpc.StatusCode] = Counter()
    for channel in (
        grpc.aio.insecure_channel(tls_server.address),
        secure_channel(tls_server, authority.ca),
        secure_channel(tls_server, replace(forged, ca=authority.ca)),
    ):
        for _ in range(-(-number // 3)):
            codes.update(await refused(ExecutorStub(channel)))
        await channel.close()
    assert set(codes) == {grpc.StatusCode.UNAVAILABLE}
    assert codes.total() >= 2 * number


async def test_another_name_of_the_same_authority_may_only_ask_for_the_health(
    tls_server: Server, authority: Authority
) -> None:
    async with secure_channel(tls_server, authority.issue("other", "DNS:other.quire.test")) as channel:
        assert await refused(ExecutorStub(channel)) == 2 * [grpc.StatusCode.PERMISSION_DENIED]
        code, details = await status(reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(timeout=10))
        assert code is grpc.StatusCode.PERMISSION_DENIED
        assert (
            details == f"this executor serves '{SCHEDULER}' only; the certificate of this call has 'other.quire.test'"
        )
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert health.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_scheduler_without_the_right_name_learns_why(tls_server: Server, authority: Authority) -> None:
    files = authority.issue("other", "DNS:other.quire.test")
    client = ExecutorClient(tls_server.address, tls=files, executor_name=EXECUTOR)
    with pytest.raises(ExecutorNotOurs, match=f"serves '{SCHEDULER}' only"):
        await client.describe(10)
    await client.close()


async def test_a_renewed_certificate_is_used_from_the_next_attempt_on(
    tls_server: Server, authority: Authority, tmp_path: Path
) -> None:
    """Before, a scheduler showed the certificate of its start, also after that had expired."""
    files = authority.issue("changing", "DNS:other.quire.test")
    client = ExecutorClient(tls_server.address, tls=files, executor_name=EXECUTOR)
    with pytest.raises(ExecutorNotOurs, match=r"has 'other\.quire\.test'"):
        await client.find(10)
    replace_pair(files, authority.issue("renewed", f"DNS:{SCHEDULER}"))
    description = await client.find(10)
    for path in (files.certificate, files.key):
        tmp_path.joinpath("x").write_text("half a file")
        tmp_path.joinpath("x").replace(path)
    assert (await client.find(10)).incarnation == description.incarnation, "the pair before that stays in use"
    await client.close()


async def test_an_executor_of_another_name_is_not_used(tls_server: Server, authority: Authority) -> None:
    files = authority.issue("scheduler", f"DNS:{SCHEDULER}")
    client = ExecutorClient(tls_server.address, tls=files, executor_name="another.test")
    with pytest.raises(ExecutorLost):
        await client.describe(1)
    await client.close()


async def test_only_the_user_can_open_the_socket_file(tmp_path: Path) -> None:
    """The mode is right from the first moment: a thread that watches the file never sees another one."""
    path = tmp_path / "new" / "executor.sock"
    modes: set[int] = set()
    seen, is_over = threading.Event(), threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            with suppress(FileNotFoundError):
                modes.add(os.stat(path).st_mode & 0o777)
                seen.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    before = os.umask(0)
    try:
        server = Server(replace(CONFIG, listen_address=f"unix:{path}"), loaded(FakeRunner()))
        address = await server.start()
        assert os.umask(0) == 0, "the mask of the process is as before"
    finally:
        os.umask(before)
    async with grpc.aio.insecure_channel(address) as channel:
        call, epoch = await open_stream(ExecutorStub(channel))
        assert epoch == 1
        call.cancel()
    assert path.stat().st_mode & 0o777 == 0o600
    await asyncio.to_thread(seen.wait, 10)
    is_over.set()
    watcher.join()
    assert path.parent.stat().st_mode & 0o777 == 0o700
    await server.stop()
    assert modes == {0o600}


@pytest.mark.parametrize("spoil", ["mode", "link", "file"])
def test_a_private_directory_that_others_can_change_is_not_used(spoil: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    address, path = private_socket("executor"), tmp_path / f"quire-{os.getuid()}"
    assert address == f"unix:{path}/executor.sock"
    with private_files(address):
        pass
    if spoil == "mode":
        path.chmod(0o755)
    else:
        path.rmdir()
        if spoil == "link":
            (tmp_path / "elsewhere").mkdir(mode=0o700)
            path.symlink_to(tmp_path / "elsewhere")
        else:
            path.write_text("")
    with pytest.raises(AddressUnusable), private_files(address):
        pass


async def test_a_socket_file_of_an_earlier_executor_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    path.chmod(0o666)
    server = Server(replace(CONFIG, listen_address=f"unix:{path}"), loaded(FakeRunner()))
    await server.start()
    assert path.stat().st_mode & 0o777 == 0o600
    await server.stop()


async def test_files_that_are_no_certificates_are_a_configuration_error(tmp_path: Path) -> None:
    nothing = str(tmp_path / "nothing")
    server = Server(tls_config(TlsFiles(nothing, nothing, nothing)), loaded(FakeRunner()))
    with pytest.raises(ConfigError, match="tls_certificate: cannot read"):
        await server.start()
    await server.stop()
