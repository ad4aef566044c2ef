"""Parses the headers of W3C Trace Context, level 1."""

import re
from dataclasses import dataclass

_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_IS_SAMPLED = 0x01
_STATE_MEMBER = re.compile(
    r"([a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
    r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)
"""OpenTelemetry logs a line for each member with another key, such as those of level 2, and drops all members."""

_MAX_STATE_CHARACTERS = 512
_MAX_STATE_MEMBERS = 32


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The client's span. Its ids have 32 and 16 lower-case hexadecimal digits, and are not all zeros.

    is_sampled   True if the client records the span
    state        the header `tracestate`, unchanged; "" if the standard does not allow it
    """

    trace_id: str
    span_id: str
    is_sampled: bool
    state: str = ""


def parse_trace_context(traceparent: str | None, tracestate: str | None = None) -> TraceContext | None:
    """Returns the client's span, or None if the header is absent or invalid: the request is served without a trace."""
    match = _TRACEPARENT.fullmatch(traceparent or "")
    if match is None or (match[1] == "00" and match[5] is not None):
        return None
    return TraceContext(
        trace_id=match[2],
        span_id=match[3],
        is_sampled=bool(int(match[4], 16) & _IS_SAMPLED),
        state=tracestate if tracestate and _is_state(tracestate) else "",
    )


def _is_state(text: str) -> bool:
    if len(text) > _MAX_STATE_CHARACTERS:
        return False
    members = [member.strip(" \t") for member in text.split(",")]
    keys = [member.partition("=")[0] for member in members]
    is_list = len(members) <= _MAX_STATE_MEMBERS and len(set(keys)) == len(keys)
    return is_list and all(map(_STATE_MEMBER.fullmatch, members))
