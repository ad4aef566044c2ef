"""Makes Prometheus metric families, and those of the scheduler core and its pool."""

from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, Exemplar, GaugeMetricFamily, HistogramMetricFamily, Metric

from quire.histogram import Histogram
from scheduler.core import KVUsage, Scheduler, Sequence, State


class MetricFamilies:
    """Makes families. Each sample is labelled with the model, and with one more label if there is one."""

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
        """Makes a histogram. `epoch_s` is the Unix time at which the clock of the exemplars was 0."""
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


def core_families(families: MetricFamilies, core: Scheduler) -> Iterator[Metric]:
    """Yields what the core counts."""
    counters = core.counters
    running = {sequence.request.request_id for sequence in core.running_sequences()}
    waiting = Counter({"new": 0, "preempted": 0, "executor_lost": 0})
    waiting.update(_reasons_to_wait(core.waiting_sequences()).values())
    yield families.gauge("quire_requests_running", "Requests with a sequence in the batch", None, {"": len(running)})
    yield families.gauge(
        "quire_queue_requests", "Requests with a waiting sequence, by why it waits", "reason", dict(waiting)
    )
    yield families.gauge(
        "quire_queue_prompt_tokens",
        "Prompt tokens of waiting sequences",
        None,
        {"": core.num_waiting_prompt_tokens},
    )
    for name, text, label, value in (
        (
            "quire_prefix_cache_queries_tokens",
            "Prompt tokens looked up in the prefix cache, at first admission",
            None,
            counters.num_prefix_queried_tokens,
        ),
        (
            "quire_prefix_cache_hits_tokens",
            "Prompt tokens found in the prefix cache, at first admission",
            None,
            counters.num_prefix_hit_tokens,
        ),
        (
            "quire_preempted_tokens",
            "Computed tokens thrown away by preemption",
            None,
            counters.num_preempted_tokens,
        ),
        ("quire_kv_cow_copies", "Shared blocks copied before a write", None, counters.num_cow_copies),
    ):
        yield families.counter(name, text, label, {"": value})
    yield families.counter(
        "quire_preemptions",
        "Preemptions of sequences, by what happens to their KV",
        "mode",
        {"recompute": counters.num_preemptions},
    )


def _reasons_to_wait(waiting: Iterable[Sequence]) -> dict[int, str]:
    """Returns the reason for each waiting request: that of its first waiting sequence."""
    reasons: dict[int, str] = {}
    for sequence in waiting:
        reasons.setdefault(sequence.request.request_id, _reason_to_wait(sequence))
    return reasons


def _reason_to_wait(sequence: Sequence) -> str:
    if sequence.state is State.PREEMPTED:
        return "preempted"
    return "executor_lost" if sequence.num_losses else "new"


def pool_families(families: MetricFamilies, usage: KVUsage) -> Iterator[Metric]:
    """Yields how the pool of KV blocks is used."""
    num_blocks = usage.num_free_blocks + usage.num_cached_blocks + usage.num_active_blocks
    yield families.gauge(
        "quire_kv_blocks", "Blocks of the pool", "state",
        {"free": usage.num_free_blocks, "cached": usage.num_cached_blocks, "active": usage.num_active_blocks},
    )  # fmt: skip
    yield families.gauge(
        "quire_kv_slots", "Token slots in active blocks", "state",
        {"used": usage.num_used_slots, "wasted": usage.num_wasted_slots},
    )  # fmt: skip
    yield families.gauge(
        "quire_kv_occupancy_ratio",
        "Active blocks divided by all blocks",
        None,
        {"": usage.num_active_blocks / max(1, num_blocks)},
    )
    yield families.gauge(
        "quire_kv_waste_ratio",
        "Wasted token slots divided by all token slots in active blocks",
        None,
        {"": usage.waste_ratio},
    )
    yield families.gauge(
        "quire_kv_shared_blocks", "Blocks in more than one block table", None, {"": usage.num_shared_blocks}
    )
