"""Serves the completions of the prompt box: takes JSON, and sends a line of JSON for each message.

Requests are checked and refused like requests over gRPC (`scheduler.requests.intake`).

    POST {"text": … or "chat": {"messages": [{"role": …, "content": …}, …]},   fields as in quire.v1.GenerateRequest
          "request_id": …, "sampling": {…}, "stopping": {…}, "structured_output": {…},
          "resumable": …, "resume": {"continuation": …,
                                     "sequences": [{"index", "token_ids", "has_last", "finished"}, …]}}

    200  {"started": {…}} {"delta": {…}} … {"finished": {…}}                    one per line; {"error": {…}} if it fails
    400  {"error": {"code", "message", "violations": [{"field", "problem"}]}}   also for 429, 500, 503 and 504

If a request is resumable, "started" has a "continuation", which is an opaque string here, and "delta" has token ids.
"""

from __future__ import annotations

import json
import logging
from base64 import b64decode, b64encode
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import grpc
from aiohttp import web
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError

from quire.http.browsers import is_of_another_origin
from quire.http.json_bodies import BodyBounds, BodyRefused, JsonBodies
from quire.http.static_files import HEADERS
from quire.unexpected import unexpected
from quire.v1 import generation_pb2 as pb
from scheduler.core import InvalidRequest, QueueFull, QuireError
from scheduler.identity.identity import CALLER
from scheduler.requests.limits import RequestLimits
from scheduler.requests.request_fields import MAX_VIOLATIONS, RequestFields
from scheduler.requests.status import ReaderStalled, code_of, status_of
from scheduler.requests.structured_output import GROUP, KINDS
from scheduler.requests.write_timeout import deliver
from scheduler.telemetry.request_observer import Caller
from scheduler.text.chat_messages import ChatMessage

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from scheduler.requests.intake import Intake

log = logging.getLogger(__name__)

MAX_CHAT_MESSAGES = RequestLimits().max_chat_messages
"""The validator's bound, which is checked here before any message is read."""

MAX_SEQUENCES = 4096
"""Entries of a resumption that are read. No request has more sequences."""

HTTP_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
"""Status codes that are not listed become 500."""

JSON_FIELDS = ("request_id", "text", "sampling", "stopping", "chat", "resumable", "resume", GROUP)
"""Fields of quire.v1.GenerateRequest that the JSON API accepts."""

NOT_IN_JSON = {"logit_bias"}
"""Fields that JSON cannot express: it has no integer keys."""


BODY_BOUNDS = BodyBounds(
    max_bytes=1 << 20, max_marks=64_000, max_held_bytes=32 << 20, max_held_bytes_of_an_address=16 << 20
)


class CompletionHandler:
    """Handles POST /live/completions. Closing the connection cancels the request."""

    def __init__(self, intake: Intake, stalled_reader_timeout_s: float = 120.0) -> None:
        self._intake = intake
        self._stalled_reader_timeout_s = stalled_reader_timeout_s
        self._bodies = JsonBodies(BODY_BOUNDS)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        if is_of_another_origin(request):
            return _refusal(403, "PERMISSION_DENIED", "a page of another origin may not ask for completions")
        response = web.StreamResponse(
            headers=HEADERS | {"Content-Type": "application/x-ndjson", "Cache-Control": "no-store"}
        )
        try:
            caller = _caller(request)
            fields = await self._read(request, caller)
            async with self._intake.open(fields, caller, None) as stream:
                await response.prepare(request)
                write = partial(_write, response, fields.get("resumable") is True)
                await deliver(stream, write, self._stalled_reader_timeout_s)
        except ConnectionResetError:  # the client has closed the connection, which has cancelled the request
            return response
        except ReaderStalled:
            abort(request)
            return response
        except QuireError as error:
            failure: Exception = error
        except Exception as error:
            log.exception("a request failed because of a bug")
            unexpected("request")
            failure = error
        else:
            return response
        if not response.prepared:
            return error_response(failure)
        await response.write(_line({"error": describe_error(failure)}))
        return response

    async def _read(self, request: web.Request, caller: Caller) -> RequestFields:
        """Returns the fields of a request. Reports a refusal to the intake before raising it."""
        try:
            return await self._bodies.read(request, read_fields)
        except BodyRefused as refused:
            error = _error_of(refused)
        except QuireError as refused:
            error = refused
        self._intake.refused(RequestFields(), caller, error)
        raise error


def abort(request: web.Request) -> None:
    """Closes the connection of a client that reads nothing. The end of a response would wait until it reads again."""
    if request.transport is not None:
        request.transport.abort()


def _error_of(refused: BodyRefused) -> QuireError:
    if refused.status == 503:
        return QueueFull("too many bodies are arriving")
    return InvalidRequest({"body": refused.problem})


def _caller(request: web.Request) -> Caller:
    headers = request.headers
    tenant = CALLER.get().tenant
    return Caller(request.remote or "", headers.get("traceparent"), headers.get("tracestate"), tenant)


async def _write(response: web.StreamResponse, is_resumable: bool, message: pb.GenerateResponse) -> None:
    await response.write(_line(_message(message, is_resumable=is_resumable)))


def read_fields(body: object) -> RequestFields:
    """Returns the fields of a JSON request. Raises InvalidRequest for unknown keys; values are not checked here."""
    if not isinstance(body, dict):
        raise InvalidRequest({"body": "must be a JSON object"})
    fields = RequestFields()
    for name, value in _known(body, "", JSON_FIELDS, fields).items():
        if name == "chat":
            fields.values["chat.messages"] = _read_chat(value, fields)
        elif name == "resume":
            fields.values |= _read_resume(value, fields)
        elif name == GROUP:
            fields.values |= _read_structured_output(value, fields)
        elif (message := pb.GenerateRequest.DESCRIPTOR.fields_by_name[name].message_type) is None:
            fields.values[name] = value
        elif not isinstance(value, dict):
            fields.add_violation(name, "must be a JSON object")
        else:
            names = set(message.fields_by_name) - NOT_IN_JSON
            known = _known(value, f"{name}.", names, fields)
            fields.values |= {f"{name}.{part}": part_value for part, part_value in known.items()}
    fields.raise_violations()
    return fields


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


def _read_chat(value: object, fields: RequestFields) -> list[ChatMessage] | None:
    """Returns the messages of a chat, with roles and contents of any type; None after a violation."""
    messages = value.get("messages") if isinstance(value, dict) else None
    if isinstance(messages, list) and len(messages) > MAX_CHAT_MESSAGES:
        fields.add_violation("chat.messages", f"must be at most {MAX_CHAT_MESSAGES}, not {len(messages)}")
        return None
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        fields.add_violation("chat.messages", "must be a list of JSON objects")
        return None
    known = [_known(message, f"chat.messages[{i}].", ("role", "content"), fields) for i, message in enumerate(messages)]
    return [ChatMessage(message.get("role", ""), message.get("content", "")) for message in known]


def _read_structured_output(value: object, fields: RequestFields) -> dict[str, Any]:
    """Returns the kinds of grammars that are given, by path."""
    if not isinstance(value, dict):
        fields.add_violation(GROUP, "must be a JSON object")
        return {}
    known = _known(value, f"{GROUP}.", KINDS, fields)
    if not isinstance(choice := known.get("choice", {}), dict):
        fields.add_violation(f"{GROUP}.choice", "must be a JSON object")
        return {}
    if "choice" in known:
        known["choice"] = _known(choice, f"{GROUP}.choice.", ("texts",), fields).get("texts", [])
    return {GROUP: True} | {KINDS[kind]: given for kind, given in known.items()}


def _read_resume(value: object, fields: RequestFields) -> dict[str, Any]:
    """Returns the parts of a resumption by path; those that cannot be read are violations and missing."""
    if not isinstance(value, dict):
        fields.add_violation("resume", "must be a JSON object")
        return {}
    known = _known(value, "resume.", ("continuation", "sequences"), fields)
    try:
        continuation = pb.Continuation.FromString(b64decode(known["continuation"], validate=True))
    except (KeyError, TypeError, ValueError, DecodeError):
        fields.add_violation("resume.continuation", "must be the started.continuation of the stream")
        return {}
    entries = known.get("sequences", [])
    if not isinstance(entries, list) or len(entries) > MAX_SEQUENCES:
        fields.add_violation("resume.sequences", f"must be a list of at most {MAX_SEQUENCES} JSON objects")
        return {}
    sequences = []
    for i, entry in enumerate(entries):
        try:
            sequences.append(pb.ResumedSequence(**entry))
        except (TypeError, ValueError, OverflowError):  # an unknown key, or a value of another type
            fields.add_violation(f"resume.sequences[{i}]", "must be a quire.v1.ResumedSequence")
    return {"resume.continuation": continuation, "resume.sequences": sequences, "resume.num_prompt_logprobs": 0}


def _known(values: Mapping[str, Any], prefix: str, names: Collection[str], fields: RequestFields) -> dict[str, Any]:
    """Returns the values of known keys; a null counts as absent. Unknown keys are violations."""
    # The number of keys that are looked at is bounded: more than MAX_VIOLATIONS are not reported anyway.
    for key in islice(values, len(names) + MAX_VIOLATIONS):
        if key not in names:
            fields.add_violation(f"{prefix}{key[:40]}", "is not a field")
    return {name: values[name] for name in names if values.get(name) is not None}


def _message(message: pb.GenerateResponse, *, is_resumable: bool) -> dict[str, Any]:
    """Returns a message as JSON, without token ids unless they are needed to resume: the page shows text."""
    if message.WhichOneof("event") == "delta":
        delta = {"index": message.delta.index, "text": message.delta.text}
        if is_resumable:
            delta |= {"token_ids": list(message.delta.token_ids), "last": message.delta.last}
        return {"delta": delta}
    continuation = message.started.continuation.SerializeToString()
    if continuation:  # taken out first, because MessageToDict would hold the event loop for a long prompt
        message = pb.GenerateResponse(started=message.started)
        message.started.ClearField("continuation")
    fields_of_message: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    if continuation:
        fields_of_message["started"]["continuation"] = b64encode(continuation).decode()
    return fields_of_message


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"
