"""Makes Prometheus metric families, among them those of the scheduler core and its pool."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, Exemplar, GaugeMetricFamily, HistogramMetricFamily, Metric

from quire.histogram import Histogram
from scheduler.core import KVUsage, Scheduler, Sequence, State
from scheduler.core.inspect.views import num_waiting_prompt_tokens


class MetricFamilies:
    """Makes metric families. Each sample is labelled with the model, and some families have one more label."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name

    def counter(self, name: str, text: str, value: int) -> Metric:
        return self._filled(CounterMetricFamily(name, text, labels=["model_name"]), {(): value})

    def counters(self, name: str, text: str, label: str, values: dict[str, int]) -> Metric:
        return self.counters_by(name, text, (label,), {(key,): value for key, value in values.items()})

    def counters_by(
        self, name: str, text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], int]
    ) -> Metric:
        return self._filled(CounterMetricFamily(name, text, labels=["model_name", *labels]), values)

    def gauge(self, name: str, text: str, value: float) -> Metric:
        return self._filled(GaugeMetricFamily(name, text, labels=["model_name"]), {(): value})

    def gauges(self, name: str, text: str, label: str, values: dict[str, int]) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name", label])
        return self._filled(family, {(key,): value for key, value in values.items()})

    def info(self, name: str, text: str, facts: dict[str, str]) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name", *facts])
        family.add_metric([self._model_name, *facts.values()], 1)
        return family

    def histogram(self, name: str, text: str, histogram: Histogram, epoch_s: float) -> Metric:
        """Makes a histogram. `epoch_s` is the Unix time at which the clock of the exemplars was 0."""
        family = HistogramMetricFamily(name, text, labels=["model_name"])
        buckets = [
            (*bucket, Exemplar(dict(last[0]), last[1], round(last[2] + epoch_s, 3))) if last else bucket
            for bucket, last in zip(histogram.cumulative(), histogram.exemplars, strict=True)
        ]
        family.add_metric([self._model_name], buckets, histogram.sum)
        return family

    def _filled(
        self, family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[tuple[str, ...], float]
    ) -> Metric:
        for labels, value in values.items():
            family.add_metric([self._model_name, *labels], value)
        return family


def core_families(families: MetricFamilies, core: Scheduler) -> Iterator[Metric]:
    """Yields the families of the core's counters and queues."""
    counters = core.state.counters
    running = {sequence.request.request_id for sequence in core.state.batch.running}
    queue = core.state.waiting
    waiting = Counter({"new": 0, "preempted": 0, "deferred": 0, "executor_lost": 0})
    waiting.update(_reasons_to_wait(queue, queue.paused).values())
    yield families.gauge("quire_requests_running", "Requests with a sequence in the batch", len(running))
    yield families.gauges(
        "quire_queue_requests", "Requests with a waiting sequence, by why it waits", "reason", waiting
    )
    yield families.gauge(
        "quire_queue_prompt_tokens",
        "Tokens of waiting sequences: of prompts, and of outputs that are resumed",
        num_waiting_prompt_tokens(core),
    )
    yield families.counter(
        "quire_prefix_cache_queries_tokens",
        "Tokens looked up in the prefix cache, at first admission: of prompts, and of outputs that are resumed",
        counters.num_prefix_queried_tokens,
    )
    yield families.counter(
        "quire_prefix_cache_hits_tokens",
        "Tokens of these lookups that were found in the prefix cache",
        counters.num_prefix_hit_tokens,
    )
    yield families.counter(
        "quire_preempted_tokens", "Computed tokens discarded by preemptions", counters.num_preempted_tokens
    )
    yield families.counter("quire_kv_cow_copies", "Shared blocks copied before a write", counters.num_cow_copies)
    yield families.counters(
        "quire_preemptions",
        "Preemptions of sequences, by what happens to their KV",
        "mode",
        {"recompute": counters.num_preemptions},
    )


def _reasons_to_wait(waiting: Iterable[Sequence], paused: Iterable[Sequence]) -> dict[int, str]:
    """Returns the reason for each waiting request: that of its first waiting sequence.

    paused  deferred sequences that are not in the queue yet
    """
    reasons: dict[int, str] = {}
    for sequence in waiting:
        reasons.setdefault(sequence.request.request_id, _reason_to_wait(sequence))
    for sequence in paused:
        reasons.setdefault(sequence.request.request_id, "deferred")
    return reasons


def _reason_to_wait(sequence: Sequence) -> str:
    if sequence.state is State.PREEMPTED:
        return "preempted"
    if sequence.num_losses:
        return "executor_lost"
    return "deferred" if sequence.num_deferrals else "new"


def pool_families(families: MetricFamilies, usage: KVUsage) -> Iterator[Metric]:
    """Yields the families of the pool of KV blocks."""
    num_blocks = usage.num_free_blocks + usage.num_cached_blocks + usage.num_active_blocks
    yield families.gauges(
        "quire_kv_blocks",
        "Blocks of the pool",
        "state",
        {"free": usage.num_free_blocks, "cached": usage.num_cached_blocks, "active": usage.num_active_blocks},
    )
    yield families.gauges(
        "quire_kv_slots",
        "Token slots in active blocks",
        "state",
        {"used": usage.num_used_token_slots, "wasted": usage.num_wasted_token_slots},
    )
    yield families.gauge(
        "quire_kv_occupancy_ratio",
        "Active blocks divided by all blocks",
        usage.num_active_blocks / max(1, num_blocks),
    )
    yield families.gauge(
        "quire_kv_waste_ratio", "Wasted token slots divided by all token slots in active blocks", usage.waste_ratio
    )
    yield families.gauge("quire_kv_shared_blocks", "Blocks in more than one block table", usage.num_shared_blocks)
