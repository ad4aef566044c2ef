"""Counts by upper bound, and for each bucket the last request that fell into it: an exemplar of OpenMetrics."""

from bisect import bisect_left
from collections.abc import Mapping
from typing import TypeAlias

ExemplarLabels: TypeAlias = Mapping[str, str]
NO_LABELS: ExemplarLabels = {}

MAX_EXEMPLAR_CHARACTERS = 128
"""Of all names and values together, by OpenMetrics; a page with a longer one is refused as a whole."""


Exemplar: TypeAlias = tuple[ExemplarLabels, float, float]
"""labels; the value that was observed; and when, by the clock of whoever observed it. A bare tuple: each message to a
client makes one."""


class Histogram:
    """Some 0.2 µs an observation, an exemplar included, without locks: it has one thread."""

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
        """The same of a request, which is its bucket's exemplar until the next one comes."""
        bucket = bisect_left(self.bounds, value)
        self.counts[bucket] += times
        self.exemplars[bucket] = (labels, value, at_s)
        self.sum += value * times

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, observations up to it), the last of them "+Inf"."""
        buckets, total = [], 0
        for bound, count in zip([*map(str, map(float, self.bounds)), "+Inf"], self.counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        return buckets


def exemplar_labels(request_id: str, trace_id: str) -> ExemplarLabels:
    """Of a request. Both are printable; a request id that is too long is cut, and an absent trace id left out."""
    labels = {"trace_id": trace_id} if trace_id else {}
    num_left = MAX_EXEMPLAR_CHARACTERS - sum(map(len, (*labels, *labels.values(), "request_id")))
    return labels | {"request_id": request_id[:num_left]}
