"""Serves the completions of the prompt box: takes JSON, and sends a line of JSON for each message.

Requests are checked and refused as those over gRPC are (`scheduler.requests.intake`).

    POST {"text": … or "chat": {"messages": [{"role": …, "content": …}, …]},   fields as in quire.v1.GenerateRequest
          "request_id": …, "sampling": {…}, "stopping": {…}}

    200  {"started": {…}} {"delta": {…}} … {"finished": {…}}                    one per line; {"error": {…}} if it fails
    400  {"error": {"code", "message", "violations": [{"field", "problem"}]}}   also for 429, 500, 503 and 504
"""

from __future__ import annotations

import json
import logging
from dataclasses import fields, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from aiohttp import web
from google.protobuf.json_format import MessageToDict

from scheduler.core import InvalidRequest, QueueFull, QuireError
from scheduler.live.browser_safety import HEADERS, is_cross_origin
from scheduler.requests.field_checks import MAX_VIOLATIONS, FieldChecks
from scheduler.requests.incoming import ChatMessage, IncomingRequest, Sampling, Stopping
from scheduler.requests.status import code_of, status_of
from scheduler.requests.validation import RequestLimits
from scheduler.requests.write_timeout import deliver

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quire.v1 import generation_pb2 as pb
    from scheduler.requests.intake import Intake

log = logging.getLogger(__name__)

T = TypeVar("T", Sampling, Stopping)

MAX_BODY_BYTES = 8 * 2**20
"""Larger than the validator's bound of the prompt, whose message is clearer."""

MAX_CHAT_MESSAGES = RequestLimits().max_chat_messages
"""The validator's bound, which is checked here before any message is read."""

HTTP_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
"""Status codes that are not listed become 500."""

NOT_IN_JSON = {"logit_bias"}
"""Fields that JSON cannot express: it has no integer keys."""


class CompletionHandler:
    """Handles POST /live/completions. Closing the connection cancels the request."""

    def __init__(self, intake: Intake, stalled_reader_timeout_s: float = 120.0) -> None:
        self._intake = intake
        self._stalled_reader_timeout_s = stalled_reader_timeout_s

    async def generate(self, request: web.Request) -> web.StreamResponse:
        if is_cross_origin(request):
            return _refusal(403, "PERMISSION_DENIED", "a page of another origin may not ask for completions")
        if request.content_type != "application/json":
            # A form of another site can send other types without a preflight request.
            return _refusal(415, "INVALID_ARGUMENT", "the body must be application/json")
        response = web.StreamResponse(
            headers=HEADERS | {"Content-Type": "application/x-ndjson", "Cache-Control": "no-store"}
        )
        try:
            async with self._intake.open(await self._read(request), None) as stream:
                await response.prepare(request)
                write = partial(_write, response)
                await deliver(stream, write, self._stalled_reader_timeout_s)
        except ConnectionResetError:  # the client has closed the connection, which has cancelled the request
            return response
        except QuireError as error:
            failure: Exception = error
        except Exception as error:
            log.exception("a request failed by a bug of ours")
            failure = error
        else:
            return response
        if not response.prepared:
            return error_response(failure)
        await response.write(_line({"error": describe_error(failure)}))
        return response

    async def _read(self, request: web.Request) -> IncomingRequest:
        """Reads the body. Raises InvalidRequest after it has reported the refusal to the intake."""
        unread = IncomingRequest(
            client=request.remote or "",
            traceparent=request.headers.get("traceparent"),
            tracestate=request.headers.get("tracestate"),
        )
        try:
            return read_request(await _body(request), unread)
        except InvalidRequest as error:
            self._intake.refused(unread, error)
            raise


async def _write(response: web.StreamResponse, message: pb.GenerateResponse) -> None:
    await response.write(_line(_message(message)))


def read_request(body: object, unread: IncomingRequest | None = None) -> IncomingRequest:
    """Makes a request from parsed JSON and from what `unread` knows already.

    Raises InvalidRequest with the keys that are not fields. The validator checks the values.
    """
    if not isinstance(body, dict):
        raise InvalidRequest({"": "must be a JSON object"})
    checks = FieldChecks()
    values = _known(body, "", {"text", "chat", "request_id", "sampling", "stopping"}, checks)
    sampling = _read(Sampling, values.get("sampling"), "sampling", checks)
    stopping = _read(Stopping, values.get("stopping"), "stopping", checks)
    chat = _read_chat(values.get("chat"), checks)
    checks.finish()
    return replace(
        unread or IncomingRequest(),
        request_id=values.get("request_id"),
        text=values.get("text"),
        chat=chat,
        sampling=sampling,
        stopping=stopping,
    )


def error_response(error: Exception) -> web.Response:
    headers = dict(HEADERS)
    if isinstance(error, QueueFull):
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    return web.json_response(
        {"error": describe_error(error)}, status=HTTP_STATUS.get(code_of(error), 500), headers=headers
    )


def describe_error(error: Exception) -> dict[str, Any]:
    """Returns the error as JSON, with the code and the message that gRPC would carry."""
    status = status_of(error)
    violations = error.violations if isinstance(error, InvalidRequest) else {}
    return {
        "code": status.code.name,
        "message": status.message,
        "violations": [{"field": field, "problem": problem} for field, problem in violations.items()],
    }


def _refusal(status: int, code: str, message: str) -> web.Response:
    body = {"error": {"code": code, "message": message, "violations": []}}
    return web.json_response(body, status=status, headers=HEADERS)


async def _body(request: web.Request) -> object:
    """Returns the parsed body. Raises InvalidRequest if it is not JSON or too large."""
    if request.content_length is not None and request.content_length > MAX_BODY_BYTES:
        raise InvalidRequest({"": f"must have at most {MAX_BODY_BYTES} bytes"})
    data = bytearray()
    async for chunk in request.content.iter_any():
        data += chunk
        if len(data) > MAX_BODY_BYTES:
            raise InvalidRequest({"": f"must have at most {MAX_BODY_BYTES} bytes"})
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest({"": "must be JSON"}) from error


def _read_chat(value: object, checks: FieldChecks) -> list[ChatMessage] | None:
    """Returns the messages, or None if there is no chat. The validator checks roles and contents."""
    if value is None:
        return None
    messages = value.get("messages") if isinstance(value, dict) else None
    if isinstance(messages, list) and len(messages) > MAX_CHAT_MESSAGES:
        checks.add("chat.messages", f"must be at most {MAX_CHAT_MESSAGES}, not {len(messages)}")
        return None
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        checks.add("chat.messages", "must be a list of JSON objects")
        return None
    known = [_known(message, f"chat.messages[{i}].", {"role", "content"}, checks) for i, message in enumerate(messages)]
    return [ChatMessage(message.get("role", ""), message.get("content", "")) for message in known]


def _read(kind: type[T], value: object, path: str, checks: FieldChecks) -> T:
    if value is None:
        return kind()
    if not isinstance(value, dict):
        checks.add(path, "must be a JSON object")
        return kind()
    names = {field.name for field in fields(kind)} - NOT_IN_JSON
    return kind(**_known(value, f"{path}.", names, checks))


def _known(values: Mapping[str, Any], prefix: str, names: set[str], checks: FieldChecks) -> dict[str, Any]:
    """Returns the values of known keys, and reports unknown ones. A null counts as absent."""
    # Among this many keys there are enough unknown ones to fill the report; the rest is not read.
    for key in islice(values, len(names) + MAX_VIOLATIONS):
        if key not in names:
            checks.add(f"{prefix}{key[:40]}", "is not a field")
    return {name: values[name] for name in names if values.get(name) is not None}


def _message(message: pb.GenerateResponse) -> dict[str, Any]:
    """Returns a message as JSON, without token ids: the page shows text."""
    if message.WhichOneof("event") == "delta":
        return {"delta": {"index": message.delta.index, "text": message.delta.text}}
    fields_of_message: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return fields_of_message


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"
