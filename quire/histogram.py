"""A histogram that remembers, for each bucket, the last request that fell into it (an exemplar of OpenMetrics)."""

from bisect import bisect_left
from collections.abc import Mapping
from typing import TypeAlias

ExemplarLabels: TypeAlias = Mapping[str, str]
NO_LABELS: ExemplarLabels = {}

MAX_EXEMPLAR_CHARACTERS = 128
"""OpenMetrics' limit for all names and values together. Prometheus refuses a whole page with a longer exemplar."""


Exemplar: TypeAlias = tuple[ExemplarLabels, float, float]
"""(labels, observed value, time of the observation). A bare tuple, because each message to a client creates one."""


class Histogram:
    """Counts by upper bound. Has no locks, so only one thread may use it. An observation takes about 0.2 µs."""

    __slots__ = ("bounds", "counts", "exemplars", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.exemplars: list[Exemplar | None] = [None] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def observe_of(self, labels: ExemplarLabels, at_s: float, value: float, times: int = 1) -> None:
        """Observes a value of a request, which becomes the exemplar of its bucket."""
        bucket = bisect_left(self.bounds, value)
        self.counts[bucket] += times
        self.exemplars[bucket] = (labels, value, at_s)
        self.sum += value * times

    def cumulative(self) -> list[tuple[str, float]]:
        """Returns (upper bound, observations up to it) for each bucket; the last bound is "+Inf"."""
        buckets, total = [], 0
        for bound, count in zip([*map(str, map(float, self.bounds)), "+Inf"], self.counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        return buckets


def exemplar_labels(request_id: str, trace_id: str) -> ExemplarLabels:
    """Returns the labels of a request. Cuts a request id that is too long, and leaves out an absent trace id.

    Both arguments are printable.
    """
    labels = {"trace_id": trace_id} if trace_id else {}
    num_left = MAX_EXEMPLAR_CHARACTERS - sum(map(len, (*labels, *labels.values(), "request_id")))
    return labels | {"request_id": request_id[:num_left]}
