"""Connections of attackers that write bytes of their own."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from quire.addresses import HostPort

_PIECE = 1 << 20


@contextlib.asynccontextmanager
async def connection(address: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    where = HostPort.parse(address)
    reader, writer = await asyncio.open_connection(where.host, where.port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def discard(reader: asyncio.StreamReader) -> None:
    """Reads until the peer closes the connection."""
    with contextlib.suppress(OSError):
        while await reader.read(_PIECE):
            pass
