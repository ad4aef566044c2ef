"""Reports the core's events to the sinks of requests, and collects what the engine has to do afterwards.

    Events ──► EventDispatcher.dispatch ──► Sink.started, prompt_logprobs, tokens, finished
                        └──► FollowUps: requests to cancel, sequences to stop, requests that may have ended

The dispatcher never calls the engine or the core, so neither changes during a dispatch.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from quire.unexpected import unexpected
from scheduler.core import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from scheduler.core import Events, Sequence, TokenLogprobs

log = logging.getLogger(__name__)

_MISFIT = "%r: its request has failed, because a prompt of %d tokens and up to %d in all never fit the new pool"
_MEANINGLESS = {
    FinishReason.NOT_FINITE: (logging.ERROR, "%r: the model returned numbers that are not finite"),
    FinishReason.GRAMMAR: (logging.WARNING, "%r: its grammar could not be followed"),
}
"""Reasons that an executor reports with a token that has no meaning."""

_BROKEN_SINK = "%r: its request is cancelled, because its sink has failed"


class Sink(Protocol):
    """Receives the events of one request. Its methods run on the event loop, return quickly and never raise."""

    def started(self, num_cached_tokens: int) -> None: ...

    def prompt_logprobs(self, first_position: int, tokens: list[TokenLogprobs]) -> None:
        """Called for prompt tokens from `first_position` on, if the request asked for their log-probabilities. All of
        them come before the first output token."""

    def tokens(self, index: int, token_ids: list[int], logprobs: list[TokenLogprobs] | None = None) -> None:
        """Called for new tokens of one sequence. `logprobs` has an entry for each of them if the request asked."""

    def finished(self, index: int, reason: FinishReason, num_preemptions: int, score: float | None = None) -> None:
        """Called when a sequence ends. Beams come with a score, the best one first, each right after all its tokens.
        ERROR, EXECUTORS_LOST, GRAMMAR, MODEL_CHANGED and NOT_FINITE end the request as a whole, whatever the index."""


@dataclass(slots=True)
class FollowUps:
    """Lists what the engine has to do after a dispatch.

    broken    requests that have failed, such as by an exception of their sink; the dispatcher has removed them, and the
              core has to cancel them
    stops     (request id, index) of sequences that a sink asked to stop
    finished  by request: the first of its sequences that has ended, and the reason; the request may have ended with it
    """

    broken: list[int] = field(default_factory=list)
    stops: list[tuple[int, int]] = field(default_factory=list)
    finished: dict[int, tuple[Sequence, FinishReason]] = field(default_factory=dict)


class EventDispatcher:
    """Holds the sinks of the requests that have not ended. If a sink raises, only its own request fails."""

    def __init__(self) -> None:
        self._sinks: dict[int, Sink] = {}
        self._follow_ups = FollowUps()
        self._is_dispatching = False
        self._ended_at_s = 0.0
        self._finish_interval_s = 1.0  # moving average of the time between two requests that end

    def __len__(self) -> int:
        return len(self._sinks)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._sinks

    @property
    def retry_after_s(self) -> float:
        """Seconds after which a request that found the queue full should come again."""
        return min(30.0, max(0.1, self._finish_interval_s))

    def add(self, request_id: int, sink: Sink) -> None:
        self._sinks[request_id] = sink

    def forget(self, request_id: int) -> bool:
        """Removes a request's sink, which receives no more events. Returns False if the request has none."""
        if self._sinks.pop(request_id, None) is None:
            return False
        now_s = time.monotonic()
        if self._ended_at_s:
            self._finish_interval_s += 0.1 * (now_s - self._ended_at_s - self._finish_interval_s)
        self._ended_at_s = now_s if self._sinks else 0.0  # the time until the next request arrives does not count
        return True

    def forget_ended(self, sequence: Sequence, reason: FinishReason) -> bool:
        """Removes the sink of a request that ended with `sequence`; logs a warning if the request can never fit."""
        request_id = sequence.request.request_id
        if reason is FinishReason.CAPACITY and (sink := self._sinks.get(request_id)) is not None:
            num_tokens = sequence.num_prompt_tokens, sequence.params.max_total_tokens
            log.warning(_MISFIT, sequence, *num_tokens, extra=_log_fields(sink))
        return self.forget(request_id)

    def defer_stop(self, request_id: int, index: int) -> bool:
        """Adds a sequence to the stops of the dispatch in progress. Returns False if no dispatch is in progress."""
        if self._is_dispatching:
            self._follow_ups.stops.append((request_id, index))
        return self._is_dispatching

    def dispatch(self, events: Events) -> FollowUps:
        """Reports events to the sinks: starts, prompt log-probabilities, tokens, beams, and then the ends."""
        self._is_dispatching = True
        try:
            self._tell_failures(events)
            self._tell_starts(events)
            self._tell_tokens(events)
            self._tell_beams(events)
            self._tell_ends(events)
        finally:
            self._is_dispatching = False
            follow_ups, self._follow_ups = self._follow_ups, FollowUps()
        return follow_ups

    def fail_all(self) -> None:
        """Ends every request with ERROR, even if some of its sequences have ended already."""
        for request_id in list(self._sinks):
            self.fail(request_id, FinishReason.ERROR)

    def fail(self, request_id: int, reason: FinishReason) -> None:
        """Ends one request as a whole, for a reason that is a failure."""
        if (sink := self._sinks.get(request_id)) is not None:
            self._tell_failure(sink, reason)
            self.forget(request_id)

    def _tell_failure(self, sink: Sink, reason: FinishReason) -> None:
        try:
            sink.finished(0, reason, 0)
        except Exception:
            log.exception("a sink failed as its request did", extra=_log_fields(sink))
            unexpected("sink")

    def _tell_failures(self, events: Events) -> None:
        """Ends requests whose last tokens have no meaning, before any client receives what was made of them."""
        for sequence, reason in events.finished:
            if reason in _MEANINGLESS and (sink := self._sink_of(sequence)) is not None:
                log.log(*_MEANINGLESS[reason], sequence, extra=_log_fields(sink))
                self._tell(sequence, sink.finished, sequence.index, reason, sequence.num_preemptions)
                self._drop(sequence)

    def _tell_starts(self, events: Events) -> None:
        for sequence in events.started:
            if (sink := self._sink_of(sequence)) is not None:
                self._tell(sequence, sink.started, sequence.num_cached_tokens or 0)
        for sequence, first_position, tokens in events.prompt_logprobs:
            if (sink := self._sink_of(sequence)) is not None:
                self._tell(sequence, sink.prompt_logprobs, first_position, tokens)

    def _tell_tokens(self, events: Events) -> None:
        """Reports the tokens. Inlines `_sink_of` and `_tell`, because a step has a token for each sequence."""
        sinks = self._sinks
        logprobs = iter(events.logprobs)
        for sequence, token_id in zip(events.sequences, events.token_ids, strict=True):
            token_logprobs = [next(logprobs)[1]] if sequence.params.num_logprobs else None
            if (sink := sinks.get(sequence.request.request_id)) is not None:
                try:
                    if token_logprobs is None:
                        sink.tokens(sequence.index, [token_id])
                    else:
                        sink.tokens(sequence.index, [token_id], token_logprobs)
                except Exception:
                    log.exception(_BROKEN_SINK, sequence, extra=_log_fields(sink))
                    self._give_up(sequence)

    def _tell_beams(self, events: Events) -> None:
        for sequence, results in events.beams:
            for index, result in enumerate(results):
                if (sink := self._sink_of(sequence)) is not None and result.token_ids:
                    self._tell(sequence, sink.tokens, index, result.token_ids)
                if (sink := self._sink_of(sequence)) is not None:
                    self._tell(sequence, sink.finished, index, result.reason, sequence.num_preemptions, result.score)
            self._follow_ups.finished.setdefault(sequence.request.request_id, (sequence, results[0].reason))

    def _tell_ends(self, events: Events) -> None:
        for sequence, reason in events.finished:
            if (sink := self._sink_of(sequence)) is not None:
                self._tell(sequence, sink.finished, sequence.index, reason, sequence.num_preemptions)
            self._follow_ups.finished.setdefault(sequence.request.request_id, (sequence, reason))

    def _sink_of(self, sequence: Sequence) -> Sink | None:
        return self._sinks.get(sequence.request.request_id)

    def _tell(self, sequence: Sequence, call: Callable[..., None], *arguments: object) -> None:
        """Calls a method of the sequence's sink, and gives up the request if the method raises an exception."""
        try:
            call(*arguments)
        except Exception:
            log.exception(_BROKEN_SINK, sequence, extra=_log_fields(self._sink_of(sequence)))
            self._give_up(sequence)

    def _give_up(self, sequence: Sequence) -> None:
        """Fails the request of a broken sink. The sink is told, because its client may wait for it."""
        unexpected("sink")
        if (sink := self._sink_of(sequence)) is not None:
            self._drop(sequence)
            self._tell_failure(sink, FinishReason.ERROR)

    def _drop(self, sequence: Sequence) -> None:
        """Removes a sink that has failed, and has the engine cancel its request."""
        if self.forget(sequence.request.request_id):
            self._follow_ups.broken.append(sequence.request.request_id)


def _log_fields(sink: Sink | None) -> dict[str, str]:
    """Returns the log fields that identify the sink's request, if the sink has any."""
    return dict(getattr(sink, "log_fields", {}))
