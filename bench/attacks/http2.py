"""Raw HTTP/2 frames (RFC 9113): enough to open streams faster than a well-behaved client would."""

import struct
from collections.abc import Mapping

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
CANCEL = 8
"""The error code of a stream that its client no longer wants."""

_HEADERS, _RST_STREAM, _SETTINGS = 1, 3, 4
_END_HEADERS = 4


def frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    """Returns a frame. payload: at most 2**14 bytes."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream_id) + payload


def settings() -> bytes:
    """Returns an empty SETTINGS frame, with which a connection begins."""
    return frame(_SETTINGS, 0, 0, b"")


def settings_acknowledged() -> bytes:
    return frame(_SETTINGS, 1, 0, b"")


def headers(stream_id: int, fields: Mapping[str, str]) -> bytes:
    """Returns a frame that opens a stream. Fields are literals without indexing (RFC 7541, 6.2.2), below 127 bytes."""
    block = bytearray()
    for name, value in fields.items():
        block += b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
    return frame(_HEADERS, _END_HEADERS, stream_id, bytes(block))


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
