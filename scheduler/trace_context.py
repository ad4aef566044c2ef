"""Where a request stands in its client's trace: the headers of W3C Trace Context, level 1."""

import re
from dataclasses import dataclass

_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_IS_SAMPLED = 0x01
_MAX_STATE_CHARACTERS = 512


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The client's span. Ids in lower-case hexadecimal: 32 and 16 digits, none of them all zeros.

    is_sampled   whether the client records it
    state        the header `tracestate`, passed on as it came
    """

    trace_id: str
    span_id: str
    is_sampled: bool
    state: str = ""


def parse_trace_context(traceparent: str | None, tracestate: str | None = None) -> TraceContext | None:
    """None where there is none, or none that the standard allows: a bad header costs a client its trace, no more."""
    match = _TRACEPARENT.fullmatch(traceparent or "")
    if match is None or (match[1] == "00" and match[5] is not None):
        return None
    state = tracestate or ""
    return TraceContext(
        trace_id=match[2],
        span_id=match[3],
        is_sampled=bool(int(match[4], 16) & _IS_SAMPLED),
        state=state if len(state) <= _MAX_STATE_CHARACTERS else "",
    )
