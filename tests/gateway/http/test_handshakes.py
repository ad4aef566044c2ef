"""Connections whose TLS handshake has not ended count as open connections, and are closed in time."""

import asyncio
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.http import server as server_bounds
from gateway.http.server import GatewayServer
from quire.tls import TlsFiles, ssl_context
from tests.support.certificates import Authority
from tests.support.gateway.rig import Rig


async def test_unfinished_handshakes_count_and_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_bounds, "HANDSHAKE_TIMEOUT_S", 1.0)
    issued = Authority.create(tmp_path).issue_for_loopback()
    async with Rig() as rig:
        tls = ssl_context(TlsFiles(issued.certificate, issued.key))
        server = GatewayServer(rig.schedulers, replace(rig.config, max_connections=2), tls)
        await server.start()
        host, port = server.address.split(":")
        opened = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
        for reader, writer in reversed(opened):  # the last one is closed at once, the others after a second
            writer.write(b"\x16\x03\x01")  # the beginning of a ClientHello
            with suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), 20) == b""
            writer.close()
        assert server.metrics.refused_connections._value.get() == 1
        await server.stop()
