"""Raw HTTP/2 frames (RFC 9113): enough to open streams faster than a well-behaved client would."""

import struct
from collections.abc import Mapping

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
CANCEL = 8
"""The error code of a stream that its client no longer wants."""

_DATA, _HEADERS, _RST_STREAM, _SETTINGS = 0, 1, 3, 4
_END_STREAM, _END_HEADERS = 1, 4
_INITIAL_WINDOW_SIZE = 4


def frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    """Returns a frame. payload: at most 2**14 bytes."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream_id) + payload


def settings(initial_window_bytes: int | None = None) -> bytes:
    """Returns a SETTINGS frame, with which a connection begins: with the window of each stream, if it is given."""
    window = b"" if initial_window_bytes is None else struct.pack(">HI", _INITIAL_WINDOW_SIZE, initial_window_bytes)
    return frame(_SETTINGS, 0, 0, window)


def settings_acknowledged() -> bytes:
    return frame(_SETTINGS, 1, 0, b"")


def headers(stream_id: int, fields: Mapping[str, str]) -> bytes:
    """Returns a frame that opens a stream. Fields are literals without indexing (RFC 7541, 6.2.2), below 127 bytes."""
    block = bytearray()
    for name, value in fields.items():
        block += b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
    return frame(_HEADERS, _END_HEADERS, stream_id, bytes(block))


def message(stream_id: int, payload: bytes) -> bytes:
    """Returns a frame with the only message of a gRPC call, at most 16,379 bytes."""
    return frame(_DATA, _END_STREAM, stream_id, b"\0" + struct.pack(">I", len(payload)) + payload)


def reset(stream_id: int) -> bytes:
    return frame(_RST_STREAM, 0, stream_id, struct.pack(">I", CANCEL))


def grpc_call(authority: str, path: str, api_key: str | None) -> dict[str, str]:
    """Returns the header fields of a gRPC call."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": authority,
        "content-type": "application/grpc",
        "te": "trailers",
    }
    return fields | ({"authorization": f"Bearer {api_key}"} if api_key else {})
