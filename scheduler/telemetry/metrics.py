"""Numbers for Prometheus. The only module that knows what a metric is called, or that Prometheus exists.

Recording happens on the event loop, for each message and each step but for no single token, and is a few additions
into plain lists; families are made when somebody scrapes. What the core and the pool count themselves is read from them
at that moment, not counted again here. Who asks for OpenMetrics gets exemplars too: of each bucket of a latency the
last request that fell into it.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, Exemplar, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from quire.histogram import NO_LABELS, ExemplarLabels, Histogram
from quire.version import build_version
from scheduler.core import FinishReason, KVUsage, Scheduler, Sequence, State, StepPlan
from scheduler.engine.engine import ServerState
from scheduler.telemetry.request_metrics import RequestMetrics, RequestSummary

if TYPE_CHECKING:
    from scheduler.engine.engine import Engine

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
FAST_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
SCHEDULE_S = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1)
SLOW_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TOKENS = tuple(2**i for i in range(18))

REJECTIONS = ("invalid_argument", "out_of_range", "resource_exhausted", "unavailable", "cancelled", "internal")
"""What can be expected. They begin at 0: the rate of a counter that is not there before its first event misses that."""

HISTOGRAMS = {
    "quire_time_to_first_token_seconds": (SLOW_S, "From a request's arrival to its first token"),
    "quire_inter_token_latency_seconds": (FAST_S, "Between two tokens of a sequence"),
    "quire_time_per_output_token_seconds": (FAST_S, "Mean of these over a sequence"),
    "quire_e2e_request_latency_seconds": (SLOW_S, "From a request's arrival to the end of its last sequence"),
    "quire_request_queue_time_seconds": (SLOW_S, "From a request's arrival to the plan that first admits it"),
    "quire_request_prefill_time_seconds": (SLOW_S, "From the plan that first admits a request to its first token"),
    "quire_request_decode_time_seconds": (SLOW_S, "From the first token to the end of the last sequence"),
    "quire_request_prompt_tokens": (TOKENS, "Prompt tokens of a request, counted at first admission"),
    "quire_request_generation_tokens": (TOKENS, "Tokens of a request's completions, counted when it ends"),
    "quire_step_batch_tokens": (TOKENS, "Tokens that a step computes, over all sequences"),
    "quire_schedule_duration_seconds": (SCHEDULE_S, "What the core took to plan a step"),
}


class SchedulerMetrics(Collector):
    """Of one scheduler. `engine` is watched once there is one. Used on the event loop's thread, scrapes included."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.engine: Engine | None = None
        self.histograms = {name: Histogram(bounds) for name, (bounds, _) in HISTOGRAMS.items()}
        self.inter_token_latency = self.histograms["quire_inter_token_latency_seconds"]
        self.num_prompt_tokens = {"computed": 0, "cached": 0}
        self.num_generation_tokens = 0
        self.num_finished: Counter[FinishReason] = Counter()
        self.num_rejected = Counter(dict.fromkeys(REJECTIONS, 0))
        self._queued: dict[int, RequestMetrics] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def request(
        self,
        num_sequences: int,
        arrival_s: float,
        exemplar: ExemplarLabels = NO_LABELS,
        on_end: Callable[[RequestSummary], None] | None = None,
    ) -> RequestMetrics:
        return RequestMetrics(self, num_sequences, arrival_s, exemplar, on_end)

    def queued(self, engine_id: int, request: RequestMetrics) -> None:
        """It waits for its first admission, which a plan brings."""
        self._queued[engine_id] = request

    def forget(self, engine_id: int) -> None:
        """It waits no more. One that did not is no error."""
        self._queued.pop(engine_id, None)

    def rejected(self, reason: str) -> None:
        """A request that never reached the queue; `reason` is its status code, as in "invalid_argument"."""
        self.num_rejected[reason] += 1

    def planned(self, plan: StepPlan, duration_s: float) -> None:
        """The core has just made this plan."""
        core = None if self.engine is None else self.engine.core
        if plan.admissions and core is not None:
            for sequence in core.state.in_flight[-1].newly_admitted():
                if (request := self._queued.pop(sequence.request.request_id, None)) is not None:
                    request.admitted()
        self.histograms["quire_step_batch_tokens"].observe(plan.num_tokens)
        self.histograms["quire_schedule_duration_seconds"].observe(duration_s)

    def answer(self, accept: str) -> tuple[str, bytes]:
        """Content type and page for whoever accepts this: OPEN_METRICS if that is named, else TEXT."""
        if _names_open_metrics(accept):
            page: bytes = openmetrics.generate_latest(self._registry, openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
            return OPEN_METRICS, page
        return TEXT, self.render()

    def render(self) -> bytes:
        """The page as TEXT."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        return []  # asked for when registering; the names are known to be ours

    def collect(self) -> Iterator[Metric]:
        engine = self.engine
        core = None if engine is None else engine.core
        # What holds of the process is told before there is a model: its label is empty then, to Prometheus absent.
        families = _Families("" if engine is None or core is None else engine.description.model_name)
        yield families.info("quire_build_info", "Always 1", {"service": "scheduler", "version": build_version()})
        yield families.gauge(
            "quire_ready", "1 while requests are served, as /readyz has it, else 0", None,
            {"": float(engine is not None and engine.state is ServerState.SERVING)},
        )  # fmt: skip
        if engine is None or core is None:
            return
        yield from self._request_families(families)
        yield families.gauge(
            "quire_queue_oldest_age_seconds", "Since the one that waits longest came into the queue, or back", None,
            {"": engine.oldest_waiting_s},
        )  # fmt: skip
        yield from _core_families(families, core)
        yield from _pool_families(families, engine.kv_usage())

    def _request_families(self, families: "_Families") -> Iterator[Metric]:
        yield families.counter("quire_prompt_tokens", "By where their KV came from", "source", self.num_prompt_tokens)
        yield families.counter(
            "quire_generation_tokens", "Tokens of completions; neither overrun nor recomputed ones", None,
            {"": self.num_generation_tokens},
        )  # fmt: skip
        yield families.counter(
            "quire_requests_finished", "By how their last sequence ended", "reason",
            {reason.value: self.num_finished[reason] for reason in FinishReason},
        )  # fmt: skip
        yield families.counter("quire_requests_rejected", "Never queued, by status code", "reason", self.num_rejected)
        for name, histogram in self.histograms.items():
            yield families.histogram(name, HISTOGRAMS[name][1], histogram, time.time() - self.clock())


class _Families:
    """Makes families whose every sample is labelled with the model, and perhaps one thing more."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name

    def counter(self, name: str, text: str, label: str | None, values: dict[str, int]) -> Metric:
        return self._filled(CounterMetricFamily(name, text, labels=self._labels(label)), label, values)

    def gauge(self, name: str, text: str, label: str | None, values: dict[str, float]) -> Metric:
        return self._filled(GaugeMetricFamily(name, text, labels=self._labels(label)), label, values)

    def info(self, name: str, text: str, facts: dict[str, str]) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name", *facts])
        family.add_metric([self._model_name, *facts.values()], 1)
        return family

    def histogram(self, name: str, text: str, histogram: Histogram, epoch_s: float) -> Metric:
        """`epoch_s`: Unix time when the clock of the exemplars was 0."""
        family = HistogramMetricFamily(name, text, labels=self._labels(None))
        buckets = [
            (*bucket, Exemplar(dict(last[0]), last[1], round(last[2] + epoch_s, 3))) if last else bucket
            for bucket, last in zip(histogram.cumulative(), histogram.exemplars, strict=True)
        ]
        family.add_metric([self._model_name], buckets, histogram.sum)
        return family

    def _labels(self, label: str | None) -> list[str]:
        return ["model_name"] if label is None else ["model_name", label]

    def _filled(
        self,
        family: CounterMetricFamily | GaugeMetricFamily,
        label: str | None,
        values: dict[str, float] | dict[str, int],
    ) -> Metric:
        for key, value in values.items():
            family.add_metric([self._model_name] if label is None else [self._model_name, key], value)
        return family


def _core_families(families: _Families, core: Scheduler) -> Iterator[Metric]:
    counters = core.state.counters
    running = {sequence.request.request_id for sequence in core.state.batch.running}
    waiting = Counter({"new": 0, "preempted": 0, "executor_lost": 0})
    waiting.update(_reasons_to_wait(core.state.waiting).values())
    yield families.gauge("quire_requests_running", "Requests with a sequence in the batch", None, {"": len(running)})
    yield families.gauge(
        "quire_queue_requests", "Requests with a sequence that waits, by what it waits after", "reason", dict(waiting)
    )
    yield families.gauge(
        "quire_queue_prompt_tokens",
        "Prompt tokens of those that wait",
        None,
        {"": core.state.waiting.num_prompt_tokens},
    )
    for name, text, label, value in (
        (
            "quire_prefix_cache_queries_tokens",
            "Prompt tokens looked up, at first admission",
            None,
            counters.num_prefix_queried_tokens,
        ),
        ("quire_prefix_cache_hits_tokens", "Of these, found", None, counters.num_prefix_hit_tokens),
        (
            "quire_preempted_tokens",
            "Computed tokens thrown away by preemption",
            None,
            counters.num_preempted_tokens,
        ),
        ("quire_kv_cow_copies", "Blocks copied because they were shared", None, counters.num_cow_copies),
    ):
        yield families.counter(name, text, label, {"": value})
    yield families.counter(
        "quire_preemptions",
        "Sequences that gave their blocks away",
        "mode",
        {"recompute": counters.num_preemptions},
    )


def _reasons_to_wait(waiting: Iterable[Sequence]) -> dict[int, str]:
    """By request: one whose samples wait apart from each other is one request, and waits for its first one's reason."""
    reasons: dict[int, str] = {}
    for sequence in waiting:
        reasons.setdefault(sequence.request.request_id, _reason_to_wait(sequence))
    return reasons


def _reason_to_wait(sequence: Sequence) -> str:
    if sequence.state is State.PREEMPTED:
        return "preempted"
    return "executor_lost" if sequence.num_losses else "new"


def _names_open_metrics(accept: str) -> bool:
    return any(media.partition(";")[0].strip().lower() == "application/openmetrics-text" for media in accept.split(","))


def _pool_families(families: _Families, usage: KVUsage) -> Iterator[Metric]:
    num_blocks = usage.num_free_blocks + usage.num_cached_blocks + usage.num_active_blocks
    yield families.gauge(
        "quire_kv_blocks", "Blocks of the pool", "state",
        {"free": usage.num_free_blocks, "cached": usage.num_cached_blocks, "active": usage.num_active_blocks},
    )  # fmt: skip
    yield families.gauge(
        "quire_kv_slots", "Places for a token in active blocks", "state",
        {"used": usage.num_used_token_slots, "wasted": usage.num_wasted_token_slots},
    )  # fmt: skip
    yield families.gauge(
        "quire_kv_occupancy_ratio",
        "Active blocks over all",
        None,
        {"": usage.num_active_blocks / max(1, num_blocks)},
    )
    yield families.gauge(
        "quire_kv_waste_ratio", "Wasted places over those in active blocks", None, {"": usage.waste_ratio}
    )
    yield families.gauge(
        "quire_kv_shared_blocks", "Blocks in several block tables", None, {"": usage.num_shared_blocks}
    )
