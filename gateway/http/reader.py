"""Writes the answer of one client, at once if the client reads fast enough."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import hdrs

if TYPE_CHECKING:
    from aiohttp import web

_MAX_BUFFERED = 16 << 10
"""Bytes that may wait for a client to read when `write_now` adds some."""


class Reader:
    """Writes to one client. aiohttp buffers about 128 KiB for it, then `write` waits until the client reads on.

    connection  of the client
    is_blocked  `write` waits
    """

    __slots__ = ("_response", "_transport", "connection", "is_blocked")

    def __init__(self, request: web.Request, response: web.StreamResponse) -> None:
        self._response = response
        self._transport = request.transport
        self.connection = request.protocol
        self.is_blocked = False

    async def write(self, text: str) -> None:
        """Raises ConnectionResetError if the client has gone."""
        self.is_blocked = True
        await self._response.write(text.encode())
        self.is_blocked = False

    @property
    def has_chunks(self) -> bool:
        """True if the response has begun in chunks, so that `write_now` may write it."""
        return self._transport is not None and self._response.headers.get(hdrs.TRANSFER_ENCODING) == "chunked"

    def is_free(self) -> bool:
        """Returns whether the client reads fast enough for `write_now`."""
        transport = self._transport
        return transport is not None and not self.is_blocked and transport.get_write_buffer_size() < _MAX_BUFFERED

    def write_now(self, text: str) -> None:
        """Writes a chunk of HTTP/1.1 (RFC 9112, section 7.1), without what aiohttp does for each. Raises
        ConnectionResetError if the client has gone."""
        if self._transport is None or self._transport.is_closing():
            raise ConnectionResetError("the client has gone")
        data = text.encode()
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
