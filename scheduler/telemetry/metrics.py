"""Prometheus metrics of the scheduler.

Measurements are recorded on the event loop for each message and each step, but not for each token. A scrape makes the
families, and reads the counters of the core and the pool at that moment. An OpenMetrics scrape also gets exemplars: for
each bucket of a latency, the last request that fell into it.
"""

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from quire.histogram import NO_LABELS, ExemplarLabels
from quire.unexpected import NUM_UNEXPECTED
from quire.version import build_version
from scheduler.core import DEFAULT_TENANT, FinishReason, StepPlan
from scheduler.engine.engine import ServerState
from scheduler.telemetry.limits import NUM_LIMITED, limited, num_open_files
from scheduler.telemetry.measurements import HISTOGRAMS, Measurements
from scheduler.telemetry.metric_families import MetricFamilies, core_families, pool_families
from scheduler.telemetry.request_metrics import RequestMetrics, RequestSummary
from scheduler.telemetry.tenant_families import tenant_families
from scheduler.text.grammars import Compilation

if TYPE_CHECKING:
    from scheduler.engine.engine import Engine

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_UNEXPECTED = ("request", "sink", "result", "plan_observer", "state_observer", "live_feed")


class SchedulerMetrics(Collector):
    """The metrics of one scheduler. Used on the event loop's thread, also for scrapes.

    engine         its state is part of the metrics, once it is set
    measurements   what the scheduler measures itself
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.engine: Engine | None = None
        self.measurements = Measurements(clock)
        self._queued: dict[int, RequestMetrics] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def clock(self) -> float:
        """Returns the time in seconds, with which all measurements are made."""
        return self.measurements.clock()

    def request(
        self,
        num_sequences: int,
        arrival_s: float,
        exemplar: ExemplarLabels = NO_LABELS,
        on_end: Callable[[RequestSummary], None] | None = None,
        tenant: str = DEFAULT_TENANT,
        *,
        is_resumed: bool = False,
    ) -> RequestMetrics:
        """Starts to measure a request."""
        return RequestMetrics(
            self.measurements, num_sequences, arrival_s, exemplar, on_end, tenant, is_resumed=is_resumed
        )

    def resumed(self) -> None:
        """Counts a request that continues a stream that broke off."""
        self.measurements.num_resumed += 1

    def queued(self, engine_id: int, request: RequestMetrics) -> None:
        """Called when a request starts to wait for its first admission by a plan."""
        self._queued[engine_id] = request

    def forget(self, engine_id: int) -> None:
        """Called when a request ends, whether it is still waiting or not."""
        self._queued.pop(engine_id, None)

    def rejected(self, reason: str, tenant: str = DEFAULT_TENANT) -> None:
        """Counts a request that never reached the queue; `reason` is its status code, such as "invalid_argument"."""
        self.measurements.num_rejected[reason] += 1
        self.measurements.tenants.rejected(tenant)

    def refused_call(self, reason: str) -> None:
        """Counts a call that was refused because of its caller: "unauthenticated" or "permission_denied"."""
        self.measurements.num_refused_calls[reason] += 1

    def compiled_grammar(self, compilation: Compilation) -> None:
        """Counts the grammar of a request, whether it can be used or not."""
        has_result = "cached" if compilation.seconds is None else "compiled"
        self.measurements.num_grammars["refused" if compilation.grammar.problem else has_result] += 1
        if compilation.seconds is not None:
            self.measurements.histograms["quire_grammar_compile_seconds"].observe(compilation.seconds)
            if compilation.grammar.limit:
                limited(compilation.grammar.limit)

    def planned(self, plan: StepPlan, duration_s: float) -> None:
        """Called when the core has made a plan."""
        core = None if self.engine is None else self.engine.core
        if plan.admissions and core is not None:
            for sequence, _ in core.state.in_flight[-1].admitted:
                if (request := self._queued.pop(sequence.request.request_id, None)) is not None:
                    request.admitted()
        histograms = self.measurements.histograms
        histograms["quire_step_batch_tokens"].observe(plan.num_tokens)
        histograms["quire_schedule_duration_seconds"].observe(duration_s)

    def answer(self, accept: str) -> tuple[str, bytes]:
        """Returns content type and page: OPEN_METRICS if the `Accept` header names it, otherwise TEXT."""
        if _names_open_metrics(accept):
            page: bytes = openmetrics.generate_latest(self._registry, openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
            return OPEN_METRICS, page
        return TEXT, self.render()

    def render(self) -> bytes:
        """Returns the page in Prometheus' text format."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Returns no names: the registry would check them for duplicates, and nothing else is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        engine = self.engine
        core = None if engine is None else engine.core
        # Metrics of the process exist before there is a model; an empty label is an absent one to Prometheus.
        families = MetricFamilies("" if engine is None or core is None else engine.description.model_name)
        yield families.info("quire_build_info", "Always 1", {"service": "scheduler", "version": build_version()})
        is_serving = engine is not None and engine.state is ServerState.SERVING
        yield families.gauge("quire_ready", "1 while requests are served, like /readyz, otherwise 0", int(is_serving))
        yield families.counters(
            "quire_calls_refused",
            "gRPC calls and HTTP requests that were refused because of their caller",
            "reason",
            self.measurements.num_refused_calls,
        )
        yield families.counters(
            "quire_limited",
            "Reads and grammars refused, connections closed and log lines left out because of a bound, by bound",
            "limit",
            NUM_LIMITED,
        )
        yield families.counters(
            "quire_unexpected_errors",
            "Exceptions that no code expected and the scheduler survived, by where. Engine failures are counted apart",
            "where",
            {where: NUM_UNEXPECTED[where] for where in _UNEXPECTED},
        )
        yield families.gauge("quire_open_files", "Open file descriptors of the scheduler", num_open_files())
        if engine is None or core is None:
            return
        yield families.counter(
            "quire_engine_failures", "Unexpected errors after which all requests failed", engine.failures.num_failures
        )
        yield from self._request_families(families)
        yield families.gauge(
            "quire_queue_oldest_age_seconds",
            "Time since the oldest waiting sequence joined or rejoined the queue",
            engine.oldest_waiting_s,
        )
        yield from core_families(families, core)
        yield from pool_families(families, engine.kv_usage())
        yield from tenant_families(families, core, self.measurements.tenants)

    def _request_families(self, families: MetricFamilies) -> Iterator[Metric]:
        measured = self.measurements
        yield families.counters(
            "quire_prompt_tokens", "Prompt tokens, by the source of their KV", "source", measured.num_prompt_tokens
        )
        yield families.counter(
            "quire_generation_tokens",
            "Tokens of completions, without overrun and recomputed tokens",
            measured.num_generation_tokens,
        )
        yield families.counters(
            "quire_requests_finished",
            "Requests that ended, by why their last sequence ended",
            "reason",
            {reason.value: measured.num_finished[reason] for reason in FinishReason},
        )
        yield families.counter(
            "quire_requests_resumed", "Requests that continue a stream that broke off", measured.num_resumed
        )
        yield families.counters(
            "quire_requests_rejected",
            "Requests that were never queued, by status code",
            "reason",
            measured.num_rejected,
        )
        yield families.counters(
            "quire_grammars",
            "Grammars of requests, by result: compiled, found in the cache, or refused",
            "result",
            measured.num_grammars,
        )
        epoch_s = time.time() - measured.clock()
        for name, histogram in measured.histograms.items():
            yield families.histogram(name, HISTOGRAMS[name][1], histogram, epoch_s)


def _names_open_metrics(accept: str) -> bool:
    return any(media.partition(";")[0].strip().lower() == "application/openmetrics-text" for media in accept.split(","))
