"""Who is told of what a step came to: the sink of each request that has not ended, as long as it wants to hear."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Protocol

from scheduler.core import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from scheduler.core import Events, Sequence, TokenLogprobs

log = logging.getLogger(__name__)

_MISFIT = "%r: its request is given up, a prompt of %d tokens and up to %d in all never fit the pool that has come"
_BROKEN_SINK = "%r: its request is given up, its sink failed"


class Sink(Protocol):
    """Where one request's events go. Called on the event loop, by the engine: quick, and never raising."""

    def started(self, num_cached_tokens: int) -> None: ...

    def prompt_logprobs(self, first_position: int, tokens: list[TokenLogprobs]) -> None:
        """Of prompt tokens from this position on, where asked for: all of them before the first output token."""

    def tokens(self, index: int, token_ids: list[int], logprobs: list[TokenLogprobs] | None = None) -> None:
        """`logprobs` is as long as `token_ids`, where asked for."""

    def finished(self, index: int, reason: FinishReason, num_preemptions: int, score: float | None = None) -> None:
        """Beams come with a score, the best one first, each with all its tokens just before. An ERROR is the request's,
        whichever sequence it comes with."""


class Audience:
    """Of one engine, on its event loop. A sink that breaks costs its own request, and nobody else's.

    give_up  ends a request whose sink broke; comes to `leave`
    is_open  whether a request has sequences that have not ended
    ended    called after each request that has left
    """

    def __init__(
        self, give_up: Callable[[int], None], is_open: Callable[[int], bool], ended: Callable[[], None]
    ) -> None:
        self._give_up = give_up
        self._is_open = is_open
        self._ended = ended
        self._sinks: dict[int, Sink] = {}
        self._ended_at_s = 0.0
        self.finish_interval_s = 1.0
        """Moving average of the time between two requests that end."""

    def __len__(self) -> int:
        return len(self._sinks)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._sinks

    def join(self, request_id: int, sink: Sink) -> None:
        self._sinks[request_id] = sink

    def leave(self, request_id: int) -> bool:
        """Its sink hears nothing more. False: it had none."""
        if self._sinks.pop(request_id, None) is None:
            return False
        now_s = time.monotonic()
        if self._ended_at_s:
            self.finish_interval_s += 0.1 * (now_s - self._ended_at_s - self.finish_interval_s)
        self._ended_at_s = now_s
        self._ended()
        return True

    def tell(self, events: Events) -> None:
        """All that came of a step, request by request; the ends last."""
        for sequence in events.started:
            if (sink := self._sinks.get(sequence.request.request_id)) is not None:
                self._tell_sink(sequence, sink.started, sequence.num_cached_tokens or 0)
        for sequence, first_position, tokens in events.prompt_logprobs:
            if (sink := self._sinks.get(sequence.request.request_id)) is not None:
                self._tell_sink(sequence, sink.prompt_logprobs, first_position, tokens)
        logprobs = iter(events.logprobs)
        for sequence, token_id in zip(events.sequences, events.token_ids, strict=True):
            news = [next(logprobs)[1]] if sequence.params.num_logprobs else None
            if (sink := self._sinks.get(sequence.request.request_id)) is not None:
                try:  # as in _tell_sink, without the price of a call for each token
                    if news is None:
                        sink.tokens(sequence.index, [token_id])
                    else:
                        sink.tokens(sequence.index, [token_id], news)
                except Exception:
                    log.exception(_BROKEN_SINK, sequence, extra=_log_fields(sink))
                    self._give_up(sequence.request.request_id)
        self._tell_beams(events)
        self.tell_finished(events)

    def fail_all(self) -> None:
        """Every request ends with ERROR, whatever its sequences have come to."""
        for request_id, sink in list(self._sinks.items()):
            try:
                sink.finished(0, FinishReason.ERROR, 0)
            except Exception:
                log.exception("a sink failed as its request did", extra=_log_fields(sink))
            self.leave(request_id)

    def _tell_beams(self, events: Events) -> None:
        for sequence, results in events.beams:
            request_id = sequence.request.request_id
            for index, result in enumerate(results):
                if (sink := self._sinks.get(request_id)) is not None and result.token_ids:
                    self._tell_sink(sequence, sink.tokens, index, result.token_ids)
                if (sink := self._sinks.get(request_id)) is not None:
                    self._tell_sink(
                        sequence, sink.finished, index, result.reason, sequence.num_preemptions, result.score
                    )
            self.leave(request_id)

    def tell_finished(self, events: Events) -> None:
        """The ends alone."""
        for sequence, reason in events.finished:
            if (sink := self._sinks.get(sequence.request.request_id)) is not None:
                self._tell_sink(sequence, sink.finished, sequence.index, reason, sequence.num_preemptions)
        for sequence, reason in events.finished:  # afterwards: several samples of one request may have ended at once
            request_id = sequence.request.request_id
            if not self._is_open(request_id):
                if reason is FinishReason.CAPACITY and (sink := self._sinks.get(request_id)) is not None:
                    num_tokens = sequence.num_prompt_tokens, sequence.params.max_total_tokens
                    log.warning(_MISFIT, sequence, *num_tokens, extra=_log_fields(sink))
                self.leave(request_id)

    def _tell_sink(self, sequence: Sequence, tell: Callable[..., None], *news: object) -> None:
        """One piece of news, and what follows if the sink breaks."""
        try:
            tell(*news)
        except Exception:
            log.exception(_BROKEN_SINK, sequence, extra=_log_fields(self._sinks.get(sequence.request.request_id)))
            self._give_up(sequence.request.request_id)


def _log_fields(sink: Sink | None) -> dict[str, str]:
    """By which a line of the log is about a sink's request, if it has any."""
    return dict(getattr(sink, "log_fields", {}))
