"""The address for a gateway of the same user: its own calls need no key, and those of its clients do."""

import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from quire.v1 import generation_pb2 as pb
from tests.scheduler.servers.test_grpc_access import ADMIN, CALLERS, PUBLIC, status
from tests.support.scheduler.callers import Callers
from tests.support.scheduler.servers import Servers

OK = grpc.StatusCode.OK
UNKNOWN_CALLER = grpc.StatusCode.UNAUTHENTICATED
A_CLIENT_WITHOUT_CREDENTIALS = (("authorization", ""),)
OPEN = {"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"}


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "local.sock")


@pytest.fixture
def callers(tmp_path: Path) -> Callers:
    return Callers(tmp_path)


@pytest.fixture
async def local(servers: Servers, callers: Callers, path: str) -> AsyncIterator[grpc.aio.Channel]:
    await servers.start(access=callers.access(), local_listen=f"unix:{path}")
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        yield channel


async def test_only_the_user_can_open_the_socket(local: grpc.aio.Channel, path: str) -> None:
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


async def test_the_gateways_own_calls_need_no_key(local: grpc.aio.Channel) -> None:
    found = {method: await status(local, method) for method in PUBLIC}
    expected = {method: row[CALLERS.index("admin")] for method, row in PUBLIC.items()}
    assert found == expected


async def test_a_client_without_credentials_is_a_stranger(local: grpc.aio.Channel) -> None:
    found = {method: await status(local, method, A_CLIENT_WITHOUT_CREDENTIALS) for method in PUBLIC}
    assert found == {method: OK if method in OPEN else UNKNOWN_CALLER for method in PUBLIC}


@pytest.mark.parametrize("caller", CALLERS[1:])
async def test_a_client_has_the_rights_of_its_key(caller: str, local: grpc.aio.Channel, callers: Callers) -> None:
    found = {method: await status(local, method, callers.metadata(caller)) for method in PUBLIC}
    assert found == {method: row[CALLERS.index(caller)] for method, row in PUBLIC.items()}


async def test_nothing_can_be_administered_there(local: grpc.aio.Channel) -> None:
    found = {method: await status(local, method) for method in ADMIN if "Health" not in method}
    assert set(found.values()) == {grpc.StatusCode.UNIMPLEMENTED}


async def test_each_stream_of_a_call_has_the_rights_of_its_client(local: grpc.aio.Channel, callers: Callers) -> None:
    call: Any = local.stream_stream(
        "/quire.v1.Generation/GenerateMany",
        request_serializer=pb.GenerateManyRequest.SerializeToString,
        response_deserializer=pb.GenerateManyResponse.FromString,
    )()
    for number, authorization in enumerate(("", "Bearer wrong", callers.header("observe")["authorization"])):
        await call.write(pb.GenerateManyRequest(stream_id=number, open=pb.OpenStream(authorization=authorization)))
    codes: dict[int, int] = {}
    while len(codes) < 3:
        response = await call.read()
        codes |= {message.stream_id: message.ended.code for message in response.messages}
    call.cancel()
    denied = grpc.StatusCode.PERMISSION_DENIED.value[0]
    assert codes == {0: UNKNOWN_CALLER.value[0], 1: UNKNOWN_CALLER.value[0], 2: denied}


async def test_an_empty_header_is_no_key_at_the_public_address_either(servers: Servers, callers: Callers) -> None:
    served = await servers.start(access=callers.access())
    method = "/quire.v1.Generation/GetServerInfo"
    assert await status(served.channel, method, A_CLIENT_WITHOUT_CREDENTIALS) is UNKNOWN_CALLER


async def test_where_no_identity_is_configured_everyone_is_anonymous(servers: Servers, path: str) -> None:
    await servers.start(local_listen=f"unix:{path}")
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        method = "/quire.v1.Generation/GetServerInfo"
        assert await status(channel, method, A_CLIENT_WITHOUT_CREDENTIALS) is OK
        assert await status(channel, method) is OK
