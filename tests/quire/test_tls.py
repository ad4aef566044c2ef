"""Tests TLS credentials: which clients can connect, and what happens when the files change."""

# ruff: noqa: ASYNC240 - these tests may block their event loop with small files
import asyncio
import logging
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest

from quire.tls import (
    TlsError,
    TlsFiles,
    certificate_names,
    channel_credentials,
    peer_names,
    server_credentials,
    ssl_context,
)
from tests.support.certificates import Authority, replace_pair

METHOD = "/test.Echo/Names"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.create(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def files(authority: Authority) -> TlsFiles:
    return authority.issue_for_loopback()


@asynccontextmanager
async def grpc_server(files: TlsFiles, require_client: bool = False) -> AsyncIterator[int]:
    """Yields the port of a server with one method, which answers with the names in the client's certificate."""

    async def names(_: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return ",".join(peer_names(context.auth_context())).encode()

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(names)
    server.add_registered_method_handlers("test.Echo", {"Names": handler})
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", {"Names": handler}),))
    port = server.add_secure_port("127.0.0.1:0", server_credentials(files, require_client))
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


@asynccontextmanager
async def asyncio_server(files: TlsFiles, require_client: bool = False) -> AsyncIterator[int]:
    """Yields the port of a server that sends the names in the client's certificate."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        names = certificate_names(writer.get_extra_info("ssl_object").getpeercert())
        writer.write(",".join(names).encode() + b"\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=ssl_context(files, require_client))
    async with server:
        yield server.sockets[0].getsockname()[1]


Served = Callable[..., "asynccontextmanager[int]"]
Ask = Callable[[int, "TlsFiles | str | None"], Awaitable[str]]
REFUSED = (grpc.aio.AioRpcError, ssl.SSLError, ConnectionError)
both = pytest.mark.parametrize("served", [grpc_server, asyncio_server], ids=["grpc", "asyncio"])


async def call(port: int, tls: TlsFiles | str | None) -> str:
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", channel_credentials(tls)) as channel:
        answer: bytes = await channel.unary_unary(METHOD)(b"", timeout=10)
        return answer.decode()


async def read_line(port: int, client: TlsFiles | str | None) -> str:
    context = ssl.create_default_context(cafile=client.ca if isinstance(client, TlsFiles) else client)
    if isinstance(client, TlsFiles):
        context.load_cert_chain(client.certificate, client.key)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    line = await reader.readline()
    writer.close()
    if not line:  # under TLS 1.3 a server refuses a client after the client's handshake has ended
        raise ConnectionError("the server refused the client")
    return line.decode().strip()


async def certificate_at(port: int) -> bytes:
    """Returns the certificate that a new connection sees, in DER."""

    def shake_hands() -> bytes:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        with socket.create_connection(("127.0.0.1", port)) as plain, context.wrap_socket(plain) as connection:
            return connection.getpeercert(binary_form=True) or b""

    return await asyncio.to_thread(shake_hands)


def der(path: str) -> bytes:
    return ssl.PEM_cert_to_DER_cert(Path(path).read_text())


async def test_a_client_connects_with_the_authoritys_certificate_only(files: TlsFiles, tmp_path: Path) -> None:
    stranger = Authority.create(tmp_path, "stranger")
    async with grpc_server(files) as port:
        assert await call(port, files.ca) == ""
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call(port, stranger.ca)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("served", "ask", "san", "name"),
    [
        (grpc_server, call, "URI:spiffe://example/billing", "spiffe://example/billing"),
        (asyncio_server, read_line, "IP:10.0.0.1", "10.0.0.1"),
        (grpc_server, call, "IP:2001:db8::1", "2001:db8::1"),
        (asyncio_server, read_line, "IP:2001:db8::1", "2001:db8::1"),
        (grpc_server, call, "IP:::ffff:1.2.3.4", "::ffff:1.2.3.4"),
        (asyncio_server, read_line, "IP:::ffff:1.2.3.4", "::ffff:1.2.3.4"),
    ],
    ids=["grpc", "asyncio", "grpc-ipv6", "asyncio-ipv6", "grpc-mapped", "asyncio-mapped"],
)
async def test_a_required_client_certificate_is_checked_and_its_names_are_known(
    served: Served, ask: Ask, san: str, name: str, authority: Authority, files: TlsFiles, tmp_path: Path
) -> None:
    client = authority.issue("client", "DNS:billing.example", san)
    forged = Authority.create(tmp_path, "stranger").issue("client", "DNS:billing.example")
    async with served(files, require_client=True) as port:
        assert await ask(port, client) == f"billing.example,{name}"
        for other in (files.ca, TlsFiles(forged.certificate, forged.key, files.ca)):
            with pytest.raises(REFUSED) as error:
                await ask(port, other)
            if isinstance(error.value, grpc.aio.AioRpcError):
                assert error.value.code() is grpc.StatusCode.UNAVAILABLE


@both
async def test_new_connections_see_a_changed_certificate(served: Served, authority: Authority, files: TlsFiles) -> None:
    async with served(files) as port:
        first = der(files.certificate)
        assert await certificate_at(port) == first
        replace_pair(files, authority.issue_for_loopback("renewed"))
        assert await certificate_at(port) == der(files.certificate) != first


@both
async def test_a_broken_pair_leaves_the_old_one_in_use(
    served: Served, authority: Authority, files: TlsFiles, caplog: pytest.LogCaptureFixture
) -> None:
    first = der(files.certificate)
    other = authority.issue_for_loopback("other")
    async with served(files) as port:
        for broken in (Path(other.certificate).read_bytes(), b"-----BEGIN CERTIFICATE-----\nMII", b""):
            Path(files.certificate).write_bytes(broken)
            caplog.clear()
            with caplog.at_level(logging.ERROR):
                assert await certificate_at(port) == first
                assert await certificate_at(port) == first
            assert [record.levelname for record in caplog.records] == ["ERROR"], "logged once for each change"
            assert files.certificate in caplog.text
        Path(files.certificate).unlink()
        assert await certificate_at(port) == first
        replace_pair(files, other)
        assert await certificate_at(port) == der(files.certificate) != first


@both
async def test_changed_authorities_decide_about_new_clients(
    served: Served, authority: Authority, tmp_path: Path
) -> None:
    mine = Authority.create(tmp_path / "mine")
    server = mine.issue_for_loopback()
    old, new = mine.issue("old", "DNS:old"), authority.issue("new", "DNS:new")
    trusted = tmp_path / "clients.pem"
    trusted.write_text(Path(mine.ca).read_text())

    async def name(client: TlsFiles) -> str:
        client = TlsFiles(client.certificate, client.key, mine.ca)
        return await (call if served is grpc_server else read_line)(port, client)

    async with served(TlsFiles(server.certificate, server.key, str(trusted)), require_client=True) as port:
        assert await name(old) == "old"
        trusted.write_text(Path(authority.ca).read_text())
        assert await name(new) == "new"
        with pytest.raises(REFUSED):
            await name(old)


@pytest.mark.parametrize("make", [server_credentials, ssl_context, channel_credentials])
def test_unusable_files_are_errors_that_name_them(
    make: Callable[[TlsFiles], object], authority: Authority, files: TlsFiles, tmp_path: Path
) -> None:
    other = authority.issue_for_loopback("other")
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("no certificate")
    for bad, message in (
        (TlsFiles("/absent.pem", files.key), "cannot read /absent.pem: No such file"),
        (TlsFiles(files.certificate, other.key), "are not a certificate and its key"),
        (TlsFiles(str(garbage), files.key), f"{garbage}.*are not a certificate and its key"),
        (TlsFiles(files.certificate, files.key, str(garbage)), f"{garbage} holds no certificates"),
    ):
        with pytest.raises(TlsError, match=message):
            make(bad)


def test_a_key_with_a_password_is_refused_and_nothing_asks_for_it(files: TlsFiles, tmp_path: Path) -> None:
    locked = tmp_path / "locked.key"
    subprocess.run(
        ["openssl", "pkcs8", "-topk8", "-in", files.key, "-out", locked, "-passout", "pass:secret"], check=True
    )
    with pytest.raises(TlsError, match="has a password"):
        server_credentials(TlsFiles(files.certificate, str(locked)))


@pytest.mark.parametrize("make", [server_credentials, ssl_context])
def test_required_client_certificates_need_their_authorities(
    make: Callable[[TlsFiles, bool], object], files: TlsFiles
) -> None:
    with pytest.raises(TlsError, match="authorities"):
        make(TlsFiles(files.certificate, files.key), True)


def test_comments_of_a_bundle_may_have_any_characters(files: TlsFiles, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle.pem"
    bundle.write_text(f"# Főtanúsítvány\n{Path(str(files.ca)).read_text()}", encoding="utf-8")
    assert channel_credentials(str(bundle))
    bundle.write_text(Path(str(files.ca)).read_text().replace("MII", "MIIő", 1), encoding="utf-8")
    with pytest.raises(TlsError, match="holds no certificates"):
        channel_credentials(str(bundle))


@pytest.mark.parametrize("kind", ["rsa", "prime256v1", "secp384r1"])
async def test_grpc_serves_with_these_kinds_of_keys(kind: str, authority: Authority) -> None:
    files = authority.issue_for_loopback(kind, key_kind=kind)
    async with grpc_server(files, require_client=True) as port:
        assert await call(port, files) == "localhost,127.0.0.1"


@pytest.mark.parametrize("kind", ["ed25519", "secp521r1", "secp256k1"])
async def test_a_key_of_a_kind_that_grpc_cannot_use_is_refused(
    kind: str, authority: Authority, files: TlsFiles, caplog: pytest.LogCaptureFixture
) -> None:
    unusable = authority.issue_for_loopback(kind, key_kind=kind)
    for make in (server_credentials, channel_credentials):
        with pytest.raises(TlsError, match=rf"{unusable.certificate}.*RSA, P-256 or P-384"):
            make(unusable)
    async with grpc_server(files) as port:
        replace_pair(files, unusable)
        assert await call(port, files.ca) == "", "the certificate before that stays"
    assert f"{files.certificate} has a key of a kind that gRPC cannot use" in caplog.text


async def test_https_serves_with_a_key_that_grpc_cannot_use(authority: Authority) -> None:
    files = authority.issue_for_loopback("modern", key_kind="ed25519")
    async with asyncio_server(files) as port:
        assert await read_line(port, files.ca) == ""
