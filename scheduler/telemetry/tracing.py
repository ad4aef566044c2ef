"""Sends traces of requests over OTLP. Importing it raises ImportError if OpenTelemetry is not installed.

    request ─┬─ queue     arrival … first admission
             ├─ prefill   … first token
             └─ decode    … end of the last sequence

The request's span is a child of its client's (W3C Trace Context), and is recorded if the client records its own. Spans
are made when a request ends, from times that the metrics record anyway, so tracing adds no cost per token.

Serving never waits for the collector. Finished spans go into a bounded queue, which an OpenTelemetry thread empties;
spans that do not fit, or cannot be delivered in time, are dropped.

Attributes follow the semantic conventions for generative AI, whose status is "development", or start with `quire.`.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from quire.version import build_version
from scheduler.core import FinishReason

try:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace import (
        INVALID_SPAN,
        NonRecordingSpan,
        SpanContext,
        SpanKind,
        StatusCode,
        TraceFlags,
        TraceState,
        set_span_in_context,
    )
except ImportError:
    raise ImportError(
        "otlp_endpoint is set, and OpenTelemetry is not installed: pip install 'quire[otel]', or leave it out"
    ) from None

if TYPE_CHECKING:
    from opentelemetry import trace as api

    from scheduler.telemetry.request_metrics import RequestSummary
    from scheduler.telemetry.request_observer import RequestFacts
    from scheduler.telemetry.trace_context import TraceContext

TRACES_PATH = "/v1/traces"
MAX_QUEUED_SPANS = 8192
DELIVERY_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 2.0

_FAILED = (
    FinishReason.ERROR,
    FinishReason.DEADLINE,
    FinishReason.TOO_LATE,
    FinishReason.CAPACITY,
    FinishReason.MODEL_CHANGED,
    FinishReason.NOT_FINITE,
    FinishReason.GRAMMAR,
    FinishReason.EXECUTORS_LOST,
)
_FINISH_REASONS = {FinishReason.EOS: "stop", FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
_INTERNAL_CODES = {"internal", "unavailable", "unknown"}

CONVENTIONAL_PARAMS = ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty")
"""Sampling parameters that the conventions name; their attributes are `gen_ai.request.*`."""
OMITTED_IF_ZERO = ("top_k", "frequency_penalty", "presence_penalty")


class OtlpTracer:
    """Sends spans to a collector at an address such as http://127.0.0.1:4318 (OTLP over HTTP, protobuf).

    As with OpenTelemetry itself, OTEL_EXPORTER_OTLP_HEADERS sets headers, such as those for authorisation, and
    OTEL_TRACES_SAMPLER sets the sampler.
    """

    def __init__(self, endpoint: str) -> None:
        path = urlsplit(endpoint).path
        exporter = OTLPSpanExporter(
            endpoint=endpoint if path.strip("/") else endpoint.rstrip("/") + TRACES_PATH, timeout=DELIVERY_TIMEOUT_S
        )
        resource = Resource.create({"service.name": "quire-scheduler", "service.version": build_version()})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=MAX_QUEUED_SPANS))
        self._tracer = self._provider.get_tracer("quire", build_version())

    def start(self, parent: TraceContext | None, *, is_chat: bool, arrival_s: float) -> OtlpTrace:
        epoch_ns = time.time_ns() - round(time.monotonic() * 1e9)
        operation = "chat" if is_chat else "text_completion"
        span = self._tracer.start_span(
            operation,
            context=set_span_in_context(_remote(parent)),
            kind=SpanKind.SERVER,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "quire",
                "gen_ai.request.stream": True,
            },
            start_time=epoch_ns + round(arrival_s * 1e9),
        )
        return OtlpTrace(self._tracer, span, epoch_ns, operation)

    def close(self) -> None:
        """Delivers the remaining spans, for at most CLOSE_TIMEOUT_S."""
        closing = threading.Thread(target=self._provider.shutdown, name="otlp-close", daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)


class OtlpTrace:
    """The span of one request. `epoch_ns` is the Unix time at which the clock of the summaries was 0."""

    __slots__ = ("_epoch_ns", "_operation", "_span", "_tracer", "trace_id")

    def __init__(self, tracer: api.Tracer, span: api.Span, epoch_ns: int, operation: str) -> None:
        self._tracer = tracer
        self._span = span
        self._epoch_ns = epoch_ns
        self._operation = operation
        self.trace_id = f"{span.get_span_context().trace_id:032x}"

    def refused(self, code: str) -> None:
        self._span.set_attribute("error.type", code)
        if code in _INTERNAL_CODES:
            self._span.set_status(StatusCode.ERROR, code)
        self._span.end()

    def ended(self, facts: RequestFacts, summary: RequestSummary) -> None:
        span = self._span
        if span.is_recording():
            span.update_name(f"{self._operation} {facts.model_name}")
            span.set_attributes(_request_attributes(facts))
            span.set_attributes(_response_attributes(summary))
            if summary.reason in _FAILED:
                span.set_status(StatusCode.ERROR, summary.reason.value)
            self._add_phases(summary)
        span.end(self._unix_ns(summary.ended_s))

    def _add_phases(self, summary: RequestSummary) -> None:
        """Adds a span for each phase. It lasts until the next one begins, or until the request's end."""
        begins_s = [summary.arrival_s, summary.started_s, summary.first_token_s, summary.ended_s]
        context = set_span_in_context(self._span)
        for phase, begin_s, end_s in zip(("queue", "prefill", "decode"), begins_s, begins_s[1:], strict=False):
            if begin_s is not None:
                child = self._tracer.start_span(phase, context=context, start_time=self._unix_ns(begin_s))
                child.end(self._unix_ns(summary.ended_s if end_s is None else end_s))

    def _unix_ns(self, time_s: float) -> int:
        return self._epoch_ns + round(time_s * 1e9)


def _remote(parent: TraceContext | None) -> api.Span:
    """Returns the client's span, which is the parent of the request's."""
    if parent is None:
        return INVALID_SPAN
    flags = TraceFlags(TraceFlags.SAMPLED if parent.is_sampled else TraceFlags.DEFAULT)
    state = TraceState.from_header([parent.state]) if parent.state else None
    return NonRecordingSpan(SpanContext(int(parent.trace_id, 16), int(parent.span_id, 16), True, flags, state))


def _request_attributes(facts: RequestFacts) -> dict[str, str | int | float]:
    attributes: dict[str, str | int | float] = {
        "gen_ai.request.model": facts.model_name,
        "gen_ai.response.model": facts.model_name,
        "gen_ai.response.id": facts.request_id,
        "gen_ai.usage.input_tokens": facts.num_prompt_tokens,
        "quire.engine_id": facts.engine_id,
    }
    if facts.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = facts.max_tokens
    if facts.num_results > 1:
        attributes["gen_ai.request.choice.count"] = facts.num_results
    for name in CONVENTIONAL_PARAMS:
        value = getattr(facts.params, name)
        if value or name not in OMITTED_IF_ZERO:
            attributes[f"gen_ai.request.{name}"] = value
    return attributes


def _response_attributes(summary: RequestSummary) -> dict[str, str | int | float | list[str]]:
    attributes: dict[str, str | int | float | list[str]] = {
        "gen_ai.usage.output_tokens": summary.num_generation_tokens,
        "gen_ai.usage.cache_read.input_tokens": summary.num_cached_tokens,
        "quire.finish_reason": summary.reason.value,
        "quire.num_preemptions": summary.num_preemptions,
    }
    if summary.reasons:
        attributes["gen_ai.response.finish_reasons"] = [_FINISH_REASONS[reason] for reason in summary.reasons]
    if summary.time_to_first_token_s is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = summary.time_to_first_token_s
    if summary.reason in _FAILED:
        attributes["error.type"] = summary.reason.value
    return attributes
