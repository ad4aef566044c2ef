"""One request's share of the metrics, and what it was when it has ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire.histogram import ExemplarLabels
    from scheduler.core import FinishReason
    from scheduler.telemetry.metrics import SchedulerMetrics


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """An admitted request, ended. Times are readings of the metrics' clock; None: it did not come to that.

    reason           why its last sequence ended; of a request that was cancelled or failed, why that is
    reasons          by sequence, of those that ended with a result
    num_preemptions  of the sequences that ended with a result
    """

    reason: FinishReason
    reasons: tuple[FinishReason, ...]
    num_cached_tokens: int
    num_generation_tokens: int
    num_preemptions: int
    arrival_s: float
    started_s: float | None
    first_token_s: float | None
    ended_s: float

    @property
    def queue_s(self) -> float:
        """Until its first admission, or its end."""
        return (self.ended_s if self.started_s is None else self.started_s) - self.arrival_s

    @property
    def time_to_first_token_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.arrival_s


class RequestMetrics:
    """Of one request, from its arrival (a reading of the metrics' clock) on.

    exemplar   the labels by which the histograms point at this request
    on_end     told once, when it has ended and everything is counted
    """

    __slots__ = (
        "_arrival_s",
        "_first_token_s",
        "_has_ended",
        "_last_token_s",
        "_metrics",
        "_num_cached_tokens",
        "_num_open",
        "_num_preemptions",
        "_num_tokens",
        "_on_end",
        "_reasons",
        "_started_s",
        "exemplar",
    )

    def __init__(
        self,
        metrics: SchedulerMetrics,
        num_sequences: int,
        arrival_s: float,
        exemplar: ExemplarLabels,
        on_end: Callable[[RequestSummary], None] | None,
    ) -> None:
        self._metrics = metrics
        self._arrival_s = arrival_s
        self.exemplar = exemplar
        self._on_end = on_end
        self._started_s: float | None = None
        self._first_token_s: dict[int, float] = {}  # by sequence
        self._last_token_s: dict[int, float] = {}
        self._num_cached_tokens = 0
        self._num_tokens = 0
        self._num_preemptions = 0
        self._reasons: dict[int, FinishReason] = {}
        self._num_open = num_sequences
        self._has_ended = False

    def admitted(self) -> None:
        """To the batch, for the first time."""
        self._started_s = now_s = self._metrics.clock()
        self._observe("quire_request_queue_time_seconds", now_s, now_s - self._arrival_s)

    def started(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """The first step that had it is done."""
        if self._started_s is None:
            self.admitted()
        metrics, now_s = self._metrics, self._metrics.clock()
        self._num_cached_tokens = num_cached_tokens
        metrics.num_prompt_tokens["cached"] += num_cached_tokens
        metrics.num_prompt_tokens["computed"] += num_prompt_tokens - num_cached_tokens
        self._observe("quire_request_prompt_tokens", now_s, num_prompt_tokens)

    def tokens(self, index: int, num_tokens: int) -> None:
        """Tokens of a sequence that leave together; they share the time since the last ones left."""
        metrics, now_s = self._metrics, self._metrics.clock()
        last_s = self._last_token_s.get(index)
        if last_s is not None:
            gap_s = (now_s - last_s) / num_tokens
            metrics.inter_token_latency.observe_of(self.exemplar, now_s, gap_s, num_tokens)
        else:
            if not self._first_token_s:
                started_s = self._arrival_s if self._started_s is None else self._started_s
                self._observe("quire_time_to_first_token_seconds", now_s, now_s - self._arrival_s)
                self._observe("quire_request_prefill_time_seconds", now_s, now_s - started_s)
            self._first_token_s[index] = now_s
        self._last_token_s[index] = now_s
        self._num_tokens += num_tokens
        metrics.num_generation_tokens += num_tokens

    def finished(self, index: int, reason: FinishReason, num_tokens: int, num_preemptions: int = 0) -> None:
        """A sequence of `num_tokens` has ended with a result."""
        if num_tokens > 1:
            first_s, last_s = self._first_token_s[index], self._last_token_s[index]
            if last_s > first_s:  # tokens that all leave together, as a beam's do, took longer than nothing
                per_token_s = (last_s - first_s) / (num_tokens - 1)
                self._observe("quire_time_per_output_token_seconds", last_s, per_token_s)
        self._reasons[index] = reason
        self._num_preemptions += num_preemptions
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
        self._observe("quire_e2e_request_latency_seconds", now_s, now_s - self._arrival_s)
        self._observe("quire_request_generation_tokens", now_s, self._num_tokens)
        first_token_s = min(self._first_token_s.values(), default=None)
        if first_token_s is not None:
            self._observe("quire_request_decode_time_seconds", now_s, now_s - first_token_s)
        if self._on_end is not None:
            self._on_end(self._summary(reason, first_token_s, now_s))

    def _observe(self, name: str, now_s: float, value: float) -> None:
        self._metrics.histograms[name].observe_of(self.exemplar, now_s, value)

    def _summary(self, reason: FinishReason, first_token_s: float | None, now_s: float) -> RequestSummary:
        return RequestSummary(
            reason=reason,
            reasons=tuple(self._reasons[index] for index in sorted(self._reasons)),
            num_cached_tokens=self._num_cached_tokens,
            num_generation_tokens=self._num_tokens,
            num_preemptions=self._num_preemptions,
            arrival_s=self._arrival_s,
            started_s=self._started_s,
            first_token_s=first_token_s,
            ended_s=now_s,
        )
