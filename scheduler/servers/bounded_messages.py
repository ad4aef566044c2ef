"""Bounds what a client's message costs to parse, before it is parsed.

protobuf parses a message in one call, during which the event loop cannot run. Its cost depends on the number of fields
more than on the size: 4 MiB of text take 4 ms, 2 million empty chat messages 200 ms. So the fields are counted first.
The count stops at the bound, so it takes a few milliseconds at most.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError

from quire.v1 import generation_pb2 as pb
from scheduler.requests.status import BadMessage
from scheduler.telemetry.limits import MESSAGE_FIELDS, limited

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from google.protobuf.descriptor import Descriptor

MAX_FIELDS = 10240
"""Most fields of a request, those of its messages included. A chat of 1,024 messages, half of them calls of tools and
half their answers, has about 6,000, a bias of 1,024 tokens 3,000, and a grammar up to 1,024 choices."""

MAX_TOKEN_IDS = 1 << 20
"""Most token ids in one list."""

_CHEAP_BYTES = 1 << 14
"""A message of this size is cheap to parse, whatever it holds."""

_VARINT, _FIXED64, _LENGTH, _GROUP, _END_GROUP, _FIXED32 = 0, 1, 2, 3, 4, 5
_MAX_DEPTH = 6
_MORE = 0x80  # set in every byte of a varint but the last


class _Malformed(Exception):
    """The bytes are no message. protobuf says so itself."""


def check_cost(data: bytes, message: Descriptor = pb.GenerateRequest.DESCRIPTOR) -> None:
    """Raises BadMessage if a serialized message may take too long to be parsed on the event loop."""
    if len(data) <= _CHEAP_BYTES:
        return
    counter = _FieldCounter(data)
    try:
        counter.count(0, len(data), message, 1)
    except BadMessage as error:
        error.first_number = counter.first_number()
        raise
    except _Malformed:
        return


def check_size(data: bytes) -> None:
    """Raises BadMessage if a serialized message is larger than every message that is cheap to parse."""
    if len(data) > _CHEAP_BYTES:
        raise BadMessage(f"the request has more than {_CHEAP_BYTES} bytes")


class BoundedMessages(grpc.aio.ServerInterceptor):
    """Refuses costly requests, and bytes that are no request, with INVALID_ARGUMENT.

    It has to stand directly under `ReadRequests`, which parses the requests and ends the call with the error. A method
    of `requests` that receives a stream finds a BadMessage in the place of such a message, and decides itself.
    """

    def __init__(self, requests: Mapping[str, Descriptor]) -> None:
        """Takes the types of large requests, by full names of methods such as "/quire.v1.Generation/Generate".

        The requests of all other methods may have 16 KiB.
        """
        self._requests = requests

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        message = self._requests.get(handler_call_details.method)

        def parse_if_cheap(data: bytes) -> object:
            try:
                if message is None:
                    check_size(data)
                else:
                    check_cost(data, message)
            except BadMessage:
                limited(MESSAGE_FIELDS)
                raise
            try:
                return handler.request_deserializer(data)
            except DecodeError:
                raise BadMessage("the message cannot be parsed") from None

        def parse_or_explain(data: bytes) -> object:
            try:
                return parse_if_cheap(data)
            except BadMessage as error:
                return error

        decides_itself = handler.request_streaming and message is not None
        return handler._replace(request_deserializer=parse_or_explain if decides_itself else parse_if_cheap)


class _FieldCounter:
    """Walks the fields of one message and of the messages in it (https://protobuf.dev/programming-guides/encoding/)."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._num_fields = 0

    def count(self, position: int, end: int, message: Descriptor, depth: int) -> None:
        """Counts the fields in data[position:end]. Raises BadMessage."""
        data, inner = self._data, _inner_fields(message)
        while position < end:
            self._num_fields += 1
            if self._num_fields > MAX_FIELDS:
                raise BadMessage(f"the request has more than {MAX_FIELDS} fields, list items included")
            tag, position = data[position], position + 1
            if tag >= _MORE:
                tag, position = self._varint(position - 1, end)
            kind = tag & 7
            if kind == _LENGTH:
                size, position = self._varint(position, end)
                if size > end - position:
                    raise _Malformed
                if size and (field := inner.get(tag >> 3)) is not None:
                    self._look_into(field, position, position + size, depth)
                position += size
            elif kind == _VARINT:
                _, position = self._varint(position, end)
            elif kind in (_FIXED64, _FIXED32):
                position += 8 if kind == _FIXED64 else 4
            elif kind in (_GROUP, _END_GROUP):
                # proto3 has no groups, but protobuf skips them and parses what follows.
                raise BadMessage("the request has a group, so its fields cannot be counted")
            else:
                raise _Malformed

    def first_number(self) -> int | None:
        """Returns the value of the first field, if it is a number with field number 1: its low 64 bits, as protobuf."""
        tag, position = self._varint(0, len(self._data))
        return self._varint(position, len(self._data))[0] % 2**64 if tag == 1 << 3 | _VARINT else None

    def _look_into(self, field: FieldDescriptor, position: int, end: int, depth: int) -> None:
        if field.message_type is None:
            numbers = np.frombuffer(self._data, dtype=np.uint8, count=end - position, offset=position)
            if int((numbers < _MORE).sum()) > MAX_TOKEN_IDS:
                raise BadMessage(f"{field.name} has more than {MAX_TOKEN_IDS} numbers")
        elif depth < _MAX_DEPTH:
            self.count(position, end, field.message_type, depth + 1)

    def _varint(self, position: int, end: int) -> tuple[int, int]:
        """Returns a number of up to ten bytes, and the position after it."""
        if position < end and (byte := self._data[position]) < _MORE:
            return byte, position + 1
        value = shift = 0
        while position < end and shift < 70:
            byte = self._data[position]
            position += 1
            value |= (byte & ~_MORE) << shift
            if byte < _MORE:
                return value, position
            shift += 7
        raise _Malformed


@cache
def _inner_fields(message: Descriptor) -> dict[int, FieldDescriptor]:
    """Returns the fields of a message that hold messages or lists of numbers, by their numbers."""
    texts = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
    return {
        field.number: field
        for field in message.fields
        if field.message_type is not None or (field.is_repeated and field.type not in texts)
    }
