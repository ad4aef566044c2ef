"""Reports each request to the metrics, to the log (one line each) and to its trace, if there is one.

Only ids, sizes, times and sampling parameters are reported, never a prompt, an output or a cache salt.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from quire.histogram import exemplar_labels
from quire.log_rate import RateLimit
from quire.logs import log_as, printable
from scheduler.core import DEFAULT_TENANT
from scheduler.telemetry.limits import LOG_LINES, limited
from scheduler.telemetry.trace_context import TraceContext, parse_trace_context

if TYPE_CHECKING:
    from scheduler.core import SequenceParams
    from scheduler.telemetry.metrics import SchedulerMetrics
    from scheduler.telemetry.request_metrics import RequestMetrics, RequestSummary

log = logging.getLogger("scheduler.requests")
# A refused request costs its client nothing.
log.addFilter(RateLimit("request refused", per_second=10, on_left_out=partial(limited, LOG_LINES)))

MAX_LOGGED_ID = 256
"""Maximum number of characters of a client's request id in the log. The ids of admitted requests are no longer."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The client of a request, as its connection and its headers describe it.

    address                   network address
    tenant                    the tenant that the verified identity names
    traceparent, tracestate   headers of W3C Trace Context
    """

    address: str = ""
    traceparent: str | None = None
    tracestate: str | None = None
    tenant: str = DEFAULT_TENANT


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """Facts about a request at its admission.

    request_id   the client's id
    engine_id    the engine's id
    num_results  sequences that the client receives, or has not received to the end
    is_resumed   it continues a stream that broke off
    max_tokens   as requested; None: as many as fit
    """

    request_id: str
    engine_id: int
    model_name: str
    num_prompt_tokens: int
    num_results: int
    max_tokens: int | None
    params: SequenceParams
    is_resumed: bool = False


class RequestTrace(Protocol):
    """The trace of one request. Exactly one of `ended` and `refused` is called, once."""

    trace_id: str

    def ended(self, facts: RequestFacts, summary: RequestSummary) -> None: ...

    def refused(self, code: str) -> None:
        """Ends the trace of a request that was never queued. `code` is its status code in lower case."""


class Tracer(Protocol):
    """Starts the traces of requests."""

    def start(self, parent: TraceContext | None, *, is_chat: bool, arrival_s: float) -> RequestTrace:
        """Starts a trace. `arrival_s` is a reading of `SchedulerMetrics.clock`, like the times of a summary."""


class RequestObserver:
    """Observes all requests of one scheduler."""

    def __init__(self, metrics: SchedulerMetrics, tracer: Tracer | None = None) -> None:
        self.metrics = metrics
        self.tracer = tracer

    def arrived(self, caller: Caller, *, request_id: object, is_chat: bool) -> ObservedRequest:
        """Starts to observe a request, and marks the log records of this task with its ids.

        `request_id` was not checked yet: it can have any type and size.
        """
        return ObservedRequest(self, caller, request_id, is_chat)


class ObservedRequest:
    """One request, from its arrival to its end."""

    __slots__ = ("_client", "_facts", "_metrics", "_request_id", "_tenant", "_trace", "_trace_id", "arrival_s")

    def __init__(self, observer: RequestObserver, caller: Caller, request_id: object, is_chat: bool) -> None:
        self._metrics = observer.metrics
        self.arrival_s = observer.metrics.clock()
        parent = parse_trace_context(caller.traceparent, caller.tracestate) if caller.traceparent else None
        self._trace: RequestTrace | None = None
        if observer.tracer is not None:
            self._trace = observer.tracer.start(parent, is_chat=is_chat, arrival_s=self.arrival_s)
            self._trace_id = self._trace.trace_id
        else:
            self._trace_id = "" if parent is None else parent.trace_id
        self._client = caller.address
        self._tenant = caller.tenant
        self._request_id = printable(request_id[:MAX_LOGGED_ID]) if isinstance(request_id, str) else ""
        self._facts: RequestFacts | None = None
        log_as(request_id=self._request_id, trace_id=self._trace_id)

    def refused(self, code: str) -> None:
        """Reports that the request never reached the queue. `code` is its status code, such as "invalid_argument"."""
        self._metrics.rejected(code, self._tenant)
        if log.isEnabledFor(logging.INFO):
            log.info("request refused", extra=self._ids() | {"status": code})
        if self._trace is not None:
            self._trace.refused(code)

    def admitted(self, facts: RequestFacts) -> RequestMetrics:
        """Returns the metrics of the request, which report its end."""
        self._facts = facts
        if facts.request_id != self._request_id:  # the client gave none, so it has one from the engine
            self._request_id = facts.request_id
            log_as(request_id=facts.request_id, trace_id=self._trace_id)
        exemplar = exemplar_labels(facts.request_id, self._trace_id)
        return self._metrics.request(
            facts.num_results, self.arrival_s, exemplar, self._ended, self._tenant, is_resumed=facts.is_resumed
        )

    def queued(self, request: RequestMetrics) -> None:
        """Called when the engine has queued the request, or has found that a resumed one needs nothing more."""
        if self._facts is not None and not request.has_ended:
            self._metrics.queued(self._facts.engine_id, request)

    def _ended(self, summary: RequestSummary) -> None:
        facts = self._facts
        if facts is None:
            raise RuntimeError("a request that was not admitted has ended")
        self._metrics.forget(facts.engine_id)
        if log.isEnabledFor(logging.INFO):
            log.info("request ended", extra=self._ids() | _summary_fields(facts, summary))
        if self._trace is not None:
            self._trace.ended(facts, summary)

    def _ids(self) -> dict[str, object]:
        """Fields of log records; a request often ends in the engine's task, whose records are not marked."""
        return {"request_id": self._request_id, "trace_id": self._trace_id, "client": self._client}


def _summary_fields(facts: RequestFacts, summary: RequestSummary) -> dict[str, object]:
    first_token_s = summary.time_to_first_token_s
    return {
        "engine_id": facts.engine_id,
        "reason": summary.reason.value,
        "is_resumed": facts.is_resumed,
        "prompt_tokens": facts.num_prompt_tokens,
        "cached_tokens": summary.num_cached_tokens,
        "generated_tokens": summary.num_generation_tokens,
        "preemptions": summary.num_preemptions,
        "queue_s": round(summary.queue_s, 6),
        "ttft_s": None if first_token_s is None else round(first_token_s, 6),
        "e2e_s": round(summary.e2e_s, 6),
    }
