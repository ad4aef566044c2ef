"""Numbers for Prometheus. The only module that knows what a metric is called, or that Prometheus exists.

Recording happens on the event loop, for each message and each step but for no single token, and is a few additions
into plain lists; families are made when somebody scrapes. What the core and the pool count themselves is read from them
at that moment, not counted again here.
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from scheduler.core import FinishReason, KVUsage, Scheduler, Sequence, State, StepPlan
from scheduler.version import build_version

if TYPE_CHECKING:
    from scheduler.engine import Engine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FAST_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
SCHEDULE_S = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1)
SLOW_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TOKENS = tuple(2**i for i in range(18))

HISTOGRAMS = {
    "quire_time_to_first_token_seconds": (SLOW_S, "From a request's arrival to its first token"),
    "quire_inter_token_latency_seconds": (FAST_S, "Between two tokens of a sequence"),
    "quire_time_per_output_token_seconds": (FAST_S, "Mean of these over a sequence"),
    "quire_e2e_request_latency_seconds": (SLOW_S, "From a request's arrival to the end of its last sequence"),
    "quire_request_queue_time_seconds": (SLOW_S, "From a request's arrival to its first admission"),
    "quire_request_prefill_time_seconds": (SLOW_S, "From first admission to the first token"),
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
        self.num_prompt_tokens = {"computed": 0, "cached": 0}
        self.num_generation_tokens = 0
        self.num_finished: Counter[FinishReason] = Counter()
        self.num_rejected: Counter[str] = Counter()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def request(self, num_sequences: int, arrival_s: float) -> "RequestMetrics":
        return RequestMetrics(self, num_sequences, arrival_s)

    def rejected(self, reason: str) -> None:
        """A request that never reached the queue; `reason` is its status code, as in "invalid_argument"."""
        self.num_rejected[reason] += 1

    def planned(self, plan: StepPlan, duration_s: float) -> None:
        self.histograms["quire_step_batch_tokens"].observe(plan.num_tokens)
        self.histograms["quire_schedule_duration_seconds"].observe(duration_s)

    def render(self) -> bytes:
        """The page that Prometheus scrapes, of type CONTENT_TYPE."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        return []  # asked for when registering; the names are known to be ours

    def collect(self) -> Iterator[Metric]:
        build = GaugeMetricFamily("quire_build_info", "Always 1", labels=["version"])
        build.add_metric([build_version()], 1)
        yield build
        core = None if self.engine is None else self.engine.core
        if self.engine is None or core is None:  # no model yet to label anything with
            return
        families = _Families(self.engine.description.model_name)
        yield from self._request_families(families)
        yield families.gauge(
            "quire_queue_oldest_age_seconds", "Since the arrival of the request that waits and arrived first", None,
            {"": self.engine.oldest_waiting_s},
        )  # fmt: skip
        yield from _core_families(families, core)
        yield from _pool_families(families, self.engine.kv_usage())

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
            yield families.histogram(name, HISTOGRAMS[name][1], histogram)


class RequestMetrics:
    """Of one request, from its arrival (a reading of the metrics' clock) on."""

    __slots__ = (
        "_arrival_s",
        "_first_token_s",
        "_has_ended",
        "_last_token_s",
        "_metrics",
        "_num_open",
        "_num_tokens",
        "_started_s",
    )

    def __init__(self, metrics: SchedulerMetrics, num_sequences: int, arrival_s: float) -> None:
        self._metrics = metrics
        self._arrival_s = arrival_s
        self._started_s = arrival_s
        self._first_token_s: dict[int, float] = {}  # by sequence
        self._last_token_s: dict[int, float] = {}
        self._num_tokens = 0
        self._num_open = num_sequences
        self._has_ended = False

    def started(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        metrics = self._metrics
        self._started_s = metrics.clock()
        metrics.num_prompt_tokens["cached"] += num_cached_tokens
        metrics.num_prompt_tokens["computed"] += num_prompt_tokens - num_cached_tokens
        metrics.histograms["quire_request_prompt_tokens"].observe(num_prompt_tokens)
        metrics.histograms["quire_request_queue_time_seconds"].observe(self._started_s - self._arrival_s)

    def tokens(self, index: int, num_tokens: int) -> None:
        """Tokens of a sequence that leave together; they share the time since the last ones left."""
        metrics, now_s = self._metrics, self._metrics.clock()
        last_s = self._last_token_s.get(index)
        if last_s is not None:
            gap_s = (now_s - last_s) / num_tokens
            metrics.histograms["quire_inter_token_latency_seconds"].observe(gap_s, num_tokens)
        else:
            if not self._first_token_s:
                metrics.histograms["quire_time_to_first_token_seconds"].observe(now_s - self._arrival_s)
                metrics.histograms["quire_request_prefill_time_seconds"].observe(now_s - self._started_s)
            self._first_token_s[index] = now_s
        self._last_token_s[index] = now_s
        self._num_tokens += num_tokens
        metrics.num_generation_tokens += num_tokens

    def finished(self, index: int, reason: FinishReason, num_tokens: int) -> None:
        """A sequence of `num_tokens` has ended with a result."""
        if num_tokens > 1:
            duration_s = self._last_token_s[index] - self._first_token_s[index]
            self._metrics.histograms["quire_time_per_output_token_seconds"].observe(duration_s / (num_tokens - 1))
        self._num_open -= 1
        if self._num_open == 0:
            self.ended(reason)

    def ended(self, reason: FinishReason) -> None:
        """The request has ended, all of it; only the first call counts."""
        if self._has_ended:
            return
        self._has_ended = True
        metrics, now_s = self._metrics, self._metrics.clock()
        metrics.num_finished[reason] += 1
        metrics.histograms["quire_e2e_request_latency_seconds"].observe(now_s - self._arrival_s)
        metrics.histograms["quire_request_generation_tokens"].observe(self._num_tokens)
        if self._first_token_s:
            decode_s = now_s - min(self._first_token_s.values())
            metrics.histograms["quire_request_decode_time_seconds"].observe(decode_s)


class Histogram:
    """Counts by upper bound. Some 0.3 µs an observation, without locks: it has one thread."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, observations up to it), the last of them "+Inf"."""
        buckets, total = [], 0
        for bound, count in zip([*map(str, map(float, self.bounds)), "+Inf"], self.counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        return buckets


class _Families:
    """Makes families whose every sample is labelled with the model, and perhaps one thing more."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name

    def counter(self, name: str, text: str, label: str | None, values: dict[str, int]) -> Metric:
        return self._filled(CounterMetricFamily(name, text, labels=self._labels(label)), label, values)

    def gauge(self, name: str, text: str, label: str | None, values: dict[str, float]) -> Metric:
        return self._filled(GaugeMetricFamily(name, text, labels=self._labels(label)), label, values)

    def histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(name, text, labels=self._labels(None))
        family.add_metric([self._model_name], histogram.cumulative(), histogram.sum)
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
    counters = core.counters
    running = {sequence.request.request_id for sequence in core.running_sequences()}
    waiting = Counter({"new": 0, "preempted": 0, "executor_lost": 0})
    waiting.update(map(_reason_to_wait, core.waiting_sequences()))
    yield families.gauge("quire_requests_running", "Requests with a sequence in the batch", None, {"": len(running)})
    yield families.gauge("quire_queue_requests", "Waiting, by what they wait for it after", "reason", dict(waiting))
    yield families.gauge(
        "quire_queue_prompt_tokens",
        "Prompt tokens of those that wait",
        None,
        {"": core.num_waiting_prompt_tokens},
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


def _reason_to_wait(sequence: Sequence) -> str:
    if sequence.state is State.PREEMPTED:
        return "preempted"
    return "new" if sequence.num_cached_tokens is None else "executor_lost"


def _pool_families(families: _Families, usage: KVUsage) -> Iterator[Metric]:
    num_blocks = usage.num_free_blocks + usage.num_cached_blocks + usage.num_active_blocks
    yield families.gauge(
        "quire_kv_blocks", "Blocks of the pool", "state",
        {"free": usage.num_free_blocks, "cached": usage.num_cached_blocks, "active": usage.num_active_blocks},
    )  # fmt: skip
    yield families.gauge(
        "quire_kv_slots", "Places for a token in active blocks", "state",
        {"used": usage.num_used_slots, "wasted": usage.num_wasted_slots},
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
