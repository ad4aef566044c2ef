"""Who is told of a request, whatever becomes of it: the metrics, the log (one line each), and its trace, if any.

Nothing of a prompt or of an output passes through here, nor its cache salt: what is logged and traced are ids, sizes,
times and sampling parameters.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from quire.histogram import exemplar_labels
from quire.logs import log_as, printable
from scheduler.telemetry.trace_context import TraceContext, parse_trace_context

if TYPE_CHECKING:
    from scheduler.core import SequenceParams
    from scheduler.requests.incoming import IncomingRequest
    from scheduler.telemetry.metrics import SchedulerMetrics
    from scheduler.telemetry.request_metrics import RequestMetrics, RequestSummary

log = logging.getLogger("scheduler.requests")

MAX_LOGGED_ID = 256
"""Characters of an id that a client made up; what is admitted has no longer one."""


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What is known of a request once it is admitted.

    request_id   as its client knows it
    engine_id    as the engine does
    num_results  sequences that the client gets
    max_tokens   as asked for; None: as many as fit
    """

    request_id: str
    engine_id: int
    model_name: str
    num_prompt_tokens: int
    num_results: int
    max_tokens: int | None
    params: SequenceParams


class RequestTrace(Protocol):
    """A request's trace. Exactly one of `ended` and `refused` is called, once."""

    trace_id: str

    def ended(self, facts: RequestFacts, summary: RequestSummary) -> None: ...

    def refused(self, code: str) -> None:
        """`code` as the metrics have it."""


class Tracer(Protocol):
    def start(self, parent: TraceContext | None, *, is_chat: bool, arrival_s: float) -> RequestTrace:
        """`arrival_s` is a reading of the metrics' clock, as are all times of a summary."""


class RequestObserver:
    def __init__(self, metrics: SchedulerMetrics, tracer: Tracer | None = None) -> None:
        self.metrics = metrics
        self.tracer = tracer

    def arrived(self, incoming: IncomingRequest) -> ObservedRequest:
        """From now on, what this task logs is about this request."""
        return ObservedRequest(self, incoming)


class ObservedRequest:
    """One request, from now on."""

    __slots__ = ("_client", "_facts", "_metrics", "_request_id", "_trace", "_trace_id", "arrival_s")

    def __init__(self, observer: RequestObserver, incoming: IncomingRequest) -> None:
        self._metrics = observer.metrics
        self.arrival_s = observer.metrics.clock()
        parent = parse_trace_context(incoming.traceparent, incoming.tracestate) if incoming.traceparent else None
        self._trace: RequestTrace | None = None
        if observer.tracer is not None:
            self._trace = observer.tracer.start(parent, is_chat=incoming.chat is not None, arrival_s=self.arrival_s)
            self._trace_id = self._trace.trace_id
        else:
            self._trace_id = "" if parent is None else parent.trace_id
        self._client = incoming.client
        request_id = incoming.request_id  # not checked yet: of any type, and of any size
        self._request_id = printable(request_id[:MAX_LOGGED_ID]) if isinstance(request_id, str) else ""
        self._facts: RequestFacts | None = None
        log_as(request_id=self._request_id, trace_id=self._trace_id)

    def refused(self, code: str) -> None:
        """It never reached the queue; `code` is its status, as in "invalid_argument"."""
        self._metrics.rejected(code)
        if log.isEnabledFor(logging.INFO):
            log.info("request refused", extra=self._ids() | {"status": code})
        if self._trace is not None:
            self._trace.refused(code)

    def admitted(self, facts: RequestFacts) -> RequestMetrics:
        self._facts = facts
        if facts.request_id != self._request_id:  # it had none; the engine has given it one
            self._request_id = facts.request_id
            log_as(request_id=facts.request_id, trace_id=self._trace_id)
        exemplar = exemplar_labels(facts.request_id, self._trace_id)
        return self._metrics.request(facts.num_results, self.arrival_s, exemplar, self._ended)

    def queued(self, request: RequestMetrics) -> None:
        """The engine has it."""
        if self._facts is not None:
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
        """Said again: a request often ends in the engine's task, which is about no request."""
        return {"request_id": self._request_id, "trace_id": self._trace_id, "client": self._client}


def _summary_fields(facts: RequestFacts, summary: RequestSummary) -> dict[str, object]:
    first_token_s = summary.time_to_first_token_s
    return {
        "engine_id": facts.engine_id,
        "reason": summary.reason.value,
        "prompt_tokens": facts.num_prompt_tokens,
        "cached_tokens": summary.num_cached_tokens,
        "generated_tokens": summary.num_generation_tokens,
        "preemptions": summary.num_preemptions,
        "queue_s": round(summary.queue_s, 6),
        "ttft_s": None if first_token_s is None else round(first_token_s, 6),
        "e2e_s": round(summary.e2e_s, 6),
    }
