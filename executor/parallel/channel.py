"""Frames over a stream socket, from rank 0 to one other rank and back.

    │ kind: 1 byte │ size: 4 bytes, little endian │ payload: size bytes │

To a rank of this machine, the socket is one end of a pair that rank 0 makes before it starts the rank, so no other
process can reach it. To a rank of another machine it is a TCP connection (`joining.py`).
"""

import json
import select
import socket
import struct
import threading
from enum import IntEnum
from typing import Any

from quire.addresses import HostPort

_HEADER = struct.Struct("<BI")
MAX_BYTES = 1 << 30
"""Maximum size of a payload: a larger number means that the two ends have lost each other."""


class FrameKind(IntEnum):
    """The kinds of frames: those of rank 0, and those of the other ranks."""

    SETUP = 1
    CONNECT = 2
    NUM_BLOCKS = 3
    COPY_BLOCKS = 4
    FORWARD = 5
    ADDRESSES = 6
    PROGRESS = 16
    LOADED = 17
    FITTING_BLOCKS = 18
    READY = 19
    FAILED = 20
    ADDRESS = 21


class ChannelClosed(Exception):
    """The process at the other end has ended, or closed its end."""


class ChannelBroken(Exception):
    """The other end sends something that is no frame, or takes nothing for too long."""


class Channel:
    """One end of a channel. One thread may send while another one receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def peer(self) -> str:
        """Returns the address of the other end of a TCP connection."""
        try:
            return str(HostPort(*self._socket.getpeername()[:2]))
        except OSError:
            return "an address that is no longer connected"

    @property
    def host(self) -> str:
        """Returns the address of this machine on a TCP connection, and "" for a pair of sockets."""
        name = self._socket.getsockname()
        return name[0] if isinstance(name, tuple) else ""

    def limit_waits(self, timeout_s: float) -> None:
        """Lets `send` and `receive` raise ChannelBroken if nothing moves for so long."""
        self._socket.settimeout(timeout_s)

    def send(self, kind: FrameKind, payload: bytes = b"") -> None:
        """Sends a frame. Raises ChannelClosed or ChannelBroken."""
        try:
            with self._sending:
                self._socket.sendall(_HEADER.pack(kind, len(payload)) + payload)
        except TimeoutError:
            raise ChannelBroken("takes no frames") from None
        except OSError as error:
            raise ChannelClosed(str(error)) from None

    def send_values(self, kind: FrameKind, values: dict[str, Any]) -> None:
        """Sends a frame with a JSON object."""
        self.send(kind, json.dumps(values).encode())

    def receive(self) -> tuple[FrameKind, bytearray]:
        """Returns the next frame. Raises ChannelClosed or ChannelBroken."""
        number, size = _HEADER.unpack(self._read(_HEADER.size))
        if size > MAX_BYTES:
            raise ChannelBroken(f"sends a frame of {size} bytes")
        try:
            kind = FrameKind(number)
        except ValueError:
            raise ChannelBroken(f"sends a frame of kind {number}") from None
        return kind, self._read(size)

    def expect(self, expected: FrameKind) -> bytearray:
        """Returns the payload of the next frame, which must be of this kind. Raises ChannelClosed or ChannelBroken."""
        kind, payload = self.receive()
        if kind is not expected:
            raise ChannelBroken(f"sends {kind.name} in place of {expected.name}")
        return payload

    def has_frame(self) -> bool:
        """Returns whether `receive` would return, or raise, at once."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def is_next(self, kind: FrameKind) -> bool:
        """Returns whether a frame of this kind has begun to arrive, so that `receive` would return it next."""
        try:
            return self.has_frame() and self._socket.recv(1, socket.MSG_PEEK) == bytes([kind])
        except OSError:  # the connection is lost
            return False

    def close(self) -> None:
        self._socket.close()

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        view, done = memoryview(data), 0
        while done < size:
            try:
                num_read = self._socket.recv_into(view[done:])
            except TimeoutError:
                raise ChannelBroken("sends nothing") from None
            except OSError as error:
                raise ChannelClosed(str(error)) from None
            if not num_read:
                raise ChannelClosed("closed")
            done += num_read
        return data


def values_of(payload: bytearray) -> dict[str, Any]:
    """Returns the JSON object of a frame. Raises ChannelBroken for anything else."""
    try:
        values = json.loads(payload)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise ChannelBroken("sends no JSON object")
    return values
