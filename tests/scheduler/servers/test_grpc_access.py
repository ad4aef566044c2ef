"""Every gRPC method of every service, called by every kind of caller."""

import asyncio
import logging
import os
import stat
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from quire.addresses import UNIX, default_admin_address
from quire.log_rate import RateLimit
from quire.tls import channel_credentials
from quire.v1 import admin_pb2, generation_pb2
from quire.v1.admin_pb2_grpc import AdminStub
from scheduler.identity.identity import CALLER, Identity, Role
from scheduler.identity.key_file import add_certificate, add_key, revoke
from scheduler.identity.permissions import METHODS
from scheduler.servers import grpc_access
from scheduler.servers.access import MAX_AUTHORIZATION_BYTES, Access
from tests.support.certificates import Authority
from tests.support.scheduler.callers import Callers
from tests.support.scheduler.fake_engine import FakeEngine
from tests.support.scheduler.servers import Served, Servers
from tests.support.waiting import until

OK = grpc.StatusCode.OK
DENIED = grpc.StatusCode.PERMISSION_DENIED
UNKNOWN_CALLER = grpc.StatusCode.UNAUTHENTICATED
INVALID = grpc.StatusCode.INVALID_ARGUMENT

CALLERS = ("none", "wrong", "generate", "observe", "admin")
# An empty request is what each method gets; Generate and GenerateMany refuse it after the caller was let in.
PUBLIC = {
    "/quire.v1.Generation/Generate": (UNKNOWN_CALLER, UNKNOWN_CALLER, INVALID, DENIED, INVALID),
    "/quire.v1.Generation/GenerateMany": (UNKNOWN_CALLER, UNKNOWN_CALLER, INVALID, DENIED, INVALID),
    "/quire.v1.Generation/GetServerInfo": (UNKNOWN_CALLER, UNKNOWN_CALLER, OK, OK, OK),
    "/quire.v1.Tokenization/Tokenize": (UNKNOWN_CALLER, UNKNOWN_CALLER, INVALID, DENIED, INVALID),
    "/quire.v1.Tokenization/Detokenize": (UNKNOWN_CALLER, UNKNOWN_CALLER, OK, DENIED, OK),
    "/quire.v1.Tokenization/GetTokenizerInfo": (UNKNOWN_CALLER, UNKNOWN_CALLER, OK, OK, OK),
    "/quire.v1.Replica/Watch": (UNKNOWN_CALLER, UNKNOWN_CALLER, DENIED, OK, OK),
    # A call without credentials in its request asks for the tenant of a client without a key.
    "/quire.v1.Replica/Identify": (UNKNOWN_CALLER, UNKNOWN_CALLER, DENIED, UNKNOWN_CALLER, UNKNOWN_CALLER),
    "/grpc.health.v1.Health/Check": (OK,) * 5,
    "/grpc.health.v1.Health/List": (UNKNOWN_CALLER, UNKNOWN_CALLER, DENIED, DENIED, DENIED),  # has no row
    "/grpc.health.v1.Health/Watch": (OK,) * 5,
}
ADMIN = {
    "/quire.v1.Admin/GetBlockMap": (UNKNOWN_CALLER, UNKNOWN_CALLER, DENIED, OK, OK),
    "/quire.v1.Admin/GetStepTrace": (UNKNOWN_CALLER, UNKNOWN_CALLER, DENIED, OK, OK),
    "/quire.v1.Admin/Drain": (UNKNOWN_CALLER, UNKNOWN_CALLER, DENIED, DENIED, OK),
    "/quire.v1.Admin/Resume": (UNKNOWN_CALLER, UNKNOWN_CALLER, DENIED, DENIED, OK),
    "/quire.v1.Admin/ResetPrefixCache": (UNKNOWN_CALLER, UNKNOWN_CALLER, DENIED, DENIED, OK),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": (UNKNOWN_CALLER, UNKNOWN_CALLER, DENIED, OK, OK),
    "/grpc.health.v1.Health/Check": (OK,) * 5,
    "/grpc.health.v1.Health/List": (UNKNOWN_CALLER, UNKNOWN_CALLER, DENIED, DENIED, DENIED),  # has no row
    "/grpc.health.v1.Health/Watch": (OK,) * 5,
}
IDENTIFY = "/quire.v1.Replica/Identify"
LOCAL_ADMIN = "127.0.0.1:0"


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[int, set[str]]:
    """The paths of all methods that are added to servers, by the server."""
    found: dict[int, set[str]] = {}
    add = grpc.aio.Server.add_generic_rpc_handlers

    def record(self: Any, handlers: Any) -> None:
        for handler in handlers:
            found.setdefault(id(self), set()).update(handler._method_handlers)
        add(self, handlers)

    monkeypatch.setattr("grpc.aio._server.Server.add_generic_rpc_handlers", record)
    return found


@pytest.fixture
def callers(tmp_path: Path) -> Callers:
    return Callers(tmp_path)


async def status(channel: grpc.aio.Channel, method: str, metadata: Any = ()) -> grpc.StatusCode:
    """Returns the status of a call with an empty request, or OK as soon as there is a response."""
    # Not a stream of requests: if one is being written while the call ends, the status is INTERNAL (grpc/grpc#36066).
    call = channel.unary_stream(method)(b"", metadata=metadata, timeout=20)
    try:
        response = await call.read()
    except grpc.aio.AioRpcError as error:
        return error.code()
    code = OK if response is not grpc.aio.EOF else await call.code()
    call.cancel()
    return code


@pytest.mark.parametrize("caller", CALLERS)
async def test_each_method_answers_each_caller_as_the_table_says(
    caller: str, servers: Servers, callers: Callers, registered: dict[int, set[str]]
) -> None:
    served = await servers.start(access=callers.access(), admin_listen=LOCAL_ADMIN)
    # A method that is added later needs a row above, and in the table of permissions.
    assert list(registered.values()) == [set(PUBLIC), set(ADMIN)]
    async with grpc.aio.insecure_channel(served.server.admin_address) as admin:
        for channel, table in ((served.channel, PUBLIC), (admin, ADMIN)):
            found = {method: await status(channel, method, callers.metadata(caller)) for method in sorted(table)}
            assert found == {method: table[method][CALLERS.index(caller)] for method in table}
    refused = [code for table in (PUBLIC, ADMIN) for codes in table.values() if (code := codes[CALLERS.index(caller)])]
    num_asked = caller in ("observe", "admin")  # Identify answers about another caller, which is no refusal of this one
    assert callers.counted.count("unauthenticated") == refused.count(UNKNOWN_CALLER) - num_asked
    assert callers.counted.count("permission_denied") == refused.count(DENIED)


@pytest.mark.parametrize("caller", CALLERS)
async def test_a_method_without_a_row_is_refused(
    caller: str, servers: Servers, callers: Callers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(METHODS, "/quire.v1.Generation/GetServerInfo")
    served = await servers.start(access=callers.access())
    code = await status(served.channel, "/quire.v1.Generation/GetServerInfo", callers.metadata(caller))
    assert code is (UNKNOWN_CALLER if caller in ("none", "wrong") else DENIED)


async def test_without_an_identity_loopback_may_generate_and_observe_but_not_administer(servers: Servers) -> None:
    served = await servers.start(admin_listen=LOCAL_ADMIN)
    async with grpc.aio.insecure_channel(served.server.admin_address) as admin:
        for channel, table in ((served.channel, PUBLIC), (admin, ADMIN)):
            for method, codes in table.items():
                may = codes[2] is not DENIED or codes[3] is not DENIED
                expected = OK if method == IDENTIFY else codes[4] if may else DENIED  # everyone has the same tenant
                assert await status(channel, method) is expected, method
    assert await status(served.channel, "/quire.v1.Generation/Generate", (("authorization", "Bearer x"),)) is INVALID


async def test_the_public_address_has_no_admin_service_and_no_reflection(servers: Servers) -> None:
    """Before, everyone who could generate could also stop the server for good with one call of Drain."""
    served = await servers.start()
    for method in ADMIN.keys() - PUBLIC.keys():
        assert await status(served.channel, method) is grpc.StatusCode.UNIMPLEMENTED, method
    assert served.engine.is_ready


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer ", "bearer qk_", "Basic %%%", "Basic cWs=", "Digest x", "Bearer a.b.c"]
)
async def test_strange_credentials_are_refused(header: str, servers: Servers, callers: Callers) -> None:
    served = await servers.start(access=callers.access())
    metadata = (("authorization", header),)
    assert await status(served.channel, "/quire.v1.Generation/GetServerInfo", metadata) is UNKNOWN_CALLER


async def test_the_longest_credentials_are_verified_in_each_call(servers: Servers, callers: Callers) -> None:
    served = await servers.start(access=callers.access())
    longest = ("authorization", "Bearer ".ljust(MAX_AUTHORIZATION_BYTES, "x"))
    for _ in range(60):
        metadata = (longest, ("tracestate", "x" * 512))
        assert await status(served.channel, "/quire.v1.Generation/GetServerInfo", metadata) is UNKNOWN_CALLER


async def test_the_handler_knows_the_caller(
    servers: Servers, callers: Callers, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = await servers.start(access=callers.access())
    seen: list[Identity] = []
    opened = served.intake.open
    monkeypatch.setattr(served.intake, "open", lambda *args: (seen.append(CALLER.get()), opened(*args))[1])
    for caller in ("generate", "admin"):
        call = served.generation.Generate(generation_pb2.GenerateRequest(text="a"), metadata=callers.metadata(caller))
        (await served.engine.next_request()).start().finish()
        assert [message async for message in call][-1].HasField("finished")
    assert [(identity.name, identity.tenant) for identity in seen] == [
        ("the-generate", "tenant-of-generate"),
        ("the-admin", "tenant-of-admin"),
    ]


async def test_keys_count_and_stop_counting_without_a_restart(servers: Servers, callers: Callers) -> None:
    served = await servers.start(access=callers.access())
    info = "/quire.v1.Generation/GetServerInfo"
    key = add_key(callers.path, Identity("late", "late", frozenset({Role.GENERATE})))
    late = (("authorization", f"Bearer {key}"),)

    async def is_known() -> bool:
        return await status(served.channel, info, late) is OK

    await until(is_known, 5)
    revoke(callers.path, "late")
    await until(lambda: _is_not(is_known), 5)
    Path(callers.path).write_text("{")  # noqa: ASYNC240
    await asyncio.sleep(0.3)
    assert await status(served.channel, info, callers.metadata("generate")) is OK, "the keys read before stay in use"


async def _is_not(condition: Any) -> bool:
    return not await condition()


async def test_no_refusal_reads_or_logs_the_secret(
    servers: Servers, callers: Callers, caplog: pytest.LogCaptureFixture
) -> None:
    served = await servers.start(access=callers.access())
    with caplog.at_level(logging.DEBUG):
        for caller in CALLERS:
            for _ in range(20):
                await status(served.channel, "/quire.v1.Generation/Generate", callers.metadata(caller))
    lines = [record for record in caplog.records if record.getMessage() == "call refused"]
    assert len(lines) == 1, "the log is limited, the metric is not"
    assert vars(lines[0])["call"] == "/quire.v1.Generation/Generate"
    assert vars(lines[0])["client"].startswith(("ipv4:127.0.0.1", "ipv6:"))
    assert len(callers.counted) == 60
    told = " ".join(f"{vars(record)}" for record in caplog.records)
    assert not any(key in told for key in callers.keys.values() if key)


@pytest.fixture
async def over_tls(servers: Servers, tmp_path: Path) -> tuple[Served, Authority, str]:
    """A server that requires client certificates, its authority, and its key file."""
    authority = Authority.create(tmp_path / "authority")
    callers = Callers(tmp_path)
    add_certificate(callers.path, Identity("billing", "money", frozenset({Role.GENERATE})), "billing.example")
    access = callers.access()
    tls = authority.issue_for_loopback()
    served = await servers.start(access=Access(access.verifier, access.refusals, tls))
    return served, authority, callers.keys["observe"] or ""


async def test_a_client_certificate_is_an_identity_and_a_key_takes_precedence(
    over_tls: tuple[Served, Authority, str],
) -> None:
    served, authority, observer = over_tls
    generate, info = "/quire.v1.Generation/Generate", "/quire.v1.Generation/GetServerInfo"
    for san, key, expected in (
        ("DNS:billing.example", None, (INVALID, OK)),
        ("DNS:stranger.example", None, (UNKNOWN_CALLER, UNKNOWN_CALLER)),
        ("DNS:stranger.example", observer, (DENIED, OK)),
        ("DNS:billing.example", observer, (DENIED, OK)),
    ):
        credentials = channel_credentials(authority.issue("client", san))
        metadata = () if key is None else (("authorization", f"Bearer {key}"),)
        async with grpc.aio.secure_channel(served.server.address, credentials) as channel:
            assert (await status(channel, generate, metadata), await status(channel, info, metadata)) == expected


async def test_the_admin_socket_is_private_and_needs_no_key(servers: Servers, callers: Callers) -> None:
    served = await servers.start(access=callers.access())
    assert served.server.admin_address == default_admin_address(served.server.address)
    path = served.server.admin_address.removeprefix(UNIX)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) == 0o700
    await served.admin.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest())
    # A key that is sent all the same decides.
    assert await status(served.admin_channel, "/quire.v1.Admin/Drain", callers.metadata("observe")) is DENIED


async def test_each_admin_call_leaves_a_line(
    servers: Servers, callers: Callers, caplog: pytest.LogCaptureFixture
) -> None:
    served = await servers.start(FakeEngine(model=None), access=callers.access(), admin_listen=LOCAL_ADMIN)
    metadata = callers.metadata("admin")
    async with grpc.aio.insecure_channel(served.server.admin_address) as channel:
        with caplog.at_level(logging.ERROR):  # the level of a quiet log, which still shows what is audited
            caplog.handler.setLevel(logging.INFO)
            admin = AdminStub(channel)
            await admin.Resume(admin_pb2.ResumeRequest(), metadata=metadata)
            with pytest.raises(grpc.aio.AioRpcError):
                await admin.GetBlockMap(admin_pb2.GetBlockMapRequest(), metadata=metadata)

        def lines() -> list[dict[str, Any]]:
            return [vars(record) for record in caplog.records if record.name == "scheduler.audit"]

        await until(lambda: len(lines()) == 2)  # the line follows the answer
    assert [(line["caller"], line["tenant"], line["call"], line["result"]) for line in lines()] == [
        ("the-admin", "tenant-of-admin", "Resume", "OK"),
        ("the-admin", "tenant-of-admin", "GetBlockMap", "UNAVAILABLE"),
    ]


async def test_an_admin_call_that_is_refused_to_a_known_caller_leaves_a_line(
    servers: Servers, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (limit,) = [each for each in grpc_access.audit_log.filters if isinstance(each, RateLimit)]
    monkeypatch.setattr(limit, "_clock", lambda: 2e9)  # a second of its own
    callers, authority = Callers(tmp_path), Authority.create(tmp_path / "authority")
    add_certificate(callers.path, Identity("billing", "money", frozenset({Role.GENERATE})), "billing.example")
    access = callers.access()
    access = Access(access.verifier, access.refusals, authority.issue_for_loopback())
    served = await servers.start(access=access, admin_listen=LOCAL_ADMIN)
    with caplog.at_level(logging.INFO):
        for san, keys in (("stranger", ["none", "wrong"]), ("billing", ["none"] + 11 * ["observe"])):
            credentials = channel_credentials(authority.issue("client", f"DNS:{san}.example"))
            async with grpc.aio.secure_channel(served.server.admin_address, credentials) as channel:
                for key in keys:
                    await status(channel, "/quire.v1.Admin/Drain", callers.metadata(key))
    assert callers.counted == ["unauthenticated"] * 2 + ["permission_denied"] * 12
    lines = [vars(record) for record in caplog.records if record.name == "scheduler.audit"]
    assert {(line["call"], line["result"]) for line in lines} == {("Drain", "PERMISSION_DENIED")}
    assert [(line["caller"], line["tenant"]) for line in lines] == [
        ("billing", "money"),
        *[("the-observe", "tenant-of-observe")] * 9,  # ten lines a second
    ]
