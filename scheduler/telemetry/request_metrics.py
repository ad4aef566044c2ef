"""Measures one request, and makes its summary when it ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire.histogram import ExemplarLabels
    from scheduler.core import FinishReason
    from scheduler.telemetry.measurements import Measurements


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """An admitted request that has ended. Times are readings of `Measurements.clock`; None: the event did not occur.

    reason           why the last sequence ended, or why the request was cancelled or failed
    reasons          the same for each sequence that ended with a result, in order of index
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
        """Time until its first admission, or until its end if it was never admitted."""
        return (self.ended_s if self.started_s is None else self.started_s) - self.arrival_s

    @property
    def time_to_first_token_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.arrival_s


class RequestMetrics:
    """Measures one request from its arrival, which is a reading of the clock.

    exemplar    labels with which the histograms refer to this request
    on_end      called once, when the request has ended and everything is counted
    is_resumed  it continues a stream that broke off. Histograms of whole requests do not count it, because another
                server has seen its beginning; only queue times and the times between tokens do. Its prompt was counted
                for the tenant there
    """

    __slots__ = (
        "_arrival_s",
        "_first_token_s",
        "_has_ended",
        "_is_resumed",
        "_last_token_s",
        "_measurements",
        "_num_cached_tokens",
        "_num_open",
        "_num_preemptions",
        "_num_tokens",
        "_on_end",
        "_reasons",
        "_started_s",
        "_tenant",
        "exemplar",
    )

    def __init__(
        self,
        measurements: Measurements,
        num_sequences: int,
        arrival_s: float,
        exemplar: ExemplarLabels,
        on_end: Callable[[RequestSummary], None] | None,
        tenant: str,
        *,
        is_resumed: bool = False,
    ) -> None:
        self._measurements = measurements
        self._arrival_s = arrival_s
        self.exemplar = exemplar
        self._on_end = on_end
        self._tenant = tenant
        self._started_s: float | None = None
        self._first_token_s: dict[int, float] = {}  # by sequence
        self._last_token_s: dict[int, float] = {}
        self._num_cached_tokens = 0
        self._num_tokens = 0
        self._num_preemptions = 0
        self._reasons: dict[int, FinishReason] = {}
        self._num_open = num_sequences
        self._has_ended = False
        self._is_resumed = is_resumed

    @property
    def num_tokens(self) -> int:
        """The tokens of all sequences that were sent."""
        return self._num_tokens

    @property
    def has_ended(self) -> bool:
        return self._has_ended

    def admitted(self) -> None:
        """Called when a plan admits the request for the first time."""
        self._started_s = now_s = self._measurements.clock()
        queue_time = self._measurements.histograms["quire_request_queue_time_seconds"]
        queue_time.observe_of(self.exemplar, now_s, now_s - self._arrival_s)

    def started(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """Called when the first step of the request is done."""
        if self._started_s is None:
            self.admitted()
        measurements, now_s = self._measurements, self._measurements.clock()
        self._num_cached_tokens = num_cached_tokens
        measurements.num_prompt_tokens["cached"] += num_cached_tokens
        measurements.num_prompt_tokens["computed"] += num_prompt_tokens - num_cached_tokens
        if not self._is_resumed:
            measurements.tenants.tokens(self._tenant, "prompt", num_prompt_tokens)
        self._observe("quire_request_prompt_tokens", now_s, num_prompt_tokens)

    def tokens(self, index: int, num_tokens: int) -> None:
        """Called when tokens of a sequence are sent together; they share the time since the previous ones."""
        measurements, now_s = self._measurements, self._measurements.clock()
        last_s = self._last_token_s.get(index)
        if last_s is not None:
            gap_s = (now_s - last_s) / num_tokens
            measurements.inter_token_latency.observe_of(self.exemplar, now_s, gap_s, num_tokens)
        else:
            if not self._first_token_s:
                started_s = self._arrival_s if self._started_s is None else self._started_s
                self._observe("quire_time_to_first_token_seconds", now_s, now_s - self._arrival_s)
                self._observe("quire_request_prefill_time_seconds", now_s, now_s - started_s)
            self._first_token_s[index] = now_s
        self._last_token_s[index] = now_s
        self._num_tokens += num_tokens
        measurements.num_generation_tokens += num_tokens
        measurements.tenants.tokens(self._tenant, "generated", num_tokens)

    def finished(self, index: int, reason: FinishReason, num_tokens: int, num_preemptions: int = 0) -> None:
        """Called when a sequence of `num_tokens` has ended with a result."""
        if num_tokens > 1:
            first_s, last_s = self._first_token_s[index], self._last_token_s[index]
            if last_s > first_s:  # tokens that are all sent together, such as a beam's, have no time between them
                per_token_s = (last_s - first_s) / (num_tokens - 1)
                self._observe("quire_time_per_output_token_seconds", last_s, per_token_s)
        self._reasons[index] = reason
        self._num_preemptions += num_preemptions
        self._num_open -= 1
        if self._num_open == 0:
            self.ended(reason)

    def ended(self, reason: FinishReason) -> None:
        """Called when the whole request has ended; only the first call counts."""
        if self._has_ended:
            return
        self._has_ended = True
        measurements, now_s = self._measurements, self._measurements.clock()
        measurements.num_finished[reason] += 1
        self._observe("quire_e2e_request_latency_seconds", now_s, now_s - self._arrival_s)
        self._observe("quire_request_generation_tokens", now_s, self._num_tokens)
        first_token_s = min(self._first_token_s.values(), default=None)
        if first_token_s is not None:
            self._observe("quire_request_decode_time_seconds", now_s, now_s - first_token_s)
        if self._on_end is not None:
            self._on_end(self._summary(reason, first_token_s, now_s))

    def _observe(self, name: str, now_s: float, value: float) -> None:
        if not self._is_resumed:
            self._measurements.histograms[name].observe_of(self.exemplar, now_s, value)

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
