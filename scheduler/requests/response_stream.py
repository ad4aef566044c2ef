"""One request's way back: tokens come in from the engine loop, messages go out as fast as the client takes them.

    engine ── started, prompt_logprobs, tokens, finished ──► ResponseStream ── messages() ──► one gRPC stream

Deltas coalesce. Whatever is ready when the client can take a message, and it is the stream's turn (`turnstile.py`),
goes into one. So a slow client costs fewer messages, not memory: what waits is at most its own output, four bytes a
token (its text, if it has stop strings; twelve bytes for each log-probability it asked for); and a busy server sends
fewer messages, not later ones at each step. With log-probabilities a message has at most MAX_LOGPROBS of them: any
client can take it.

Text is made when it is taken. With stop strings it is made at once, so that a slow reader does not keep a sequence
running that has ended.

What a Delta reports. `token_ids` are all tokens of the completion: the EOS or stop id that ended it, and the token that
completed a stop string, belong to it; tokens computed after that do not, and neither does anything count them. So with
`include_stop` false the last tokens may have text that `text` lacks. EOS and stop ids have text only with
`include_stop`, and only if they are not special tokens. `logprobs` are those of `token_ids`, one by one: neither waits
for text that is held back.
"""

import asyncio
from array import array
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass

from quire.v1 import generation_pb2 as wire
from scheduler.core import CapacityExceeded, FinishReason, TokenLogprobs
from scheduler.requests.logprob_buffer import MAX_LOGPROBS, LogprobBuffer, PromptLogprobs
from scheduler.requests.status import DeadlineExceeded, RequestCancelled, RequestFailed
from scheduler.requests.write_queue import Turnstile
from scheduler.telemetry.request_metrics import RequestMetrics
from scheduler.text.detokenizer import Detokenizer
from scheduler.text.stop_strings import StopMatcher

FINISH_REASONS = {
    FinishReason.EOS: wire.FINISH_REASON_EOS,
    FinishReason.LENGTH: wire.FINISH_REASON_LENGTH,
    FinishReason.STOP: wire.FINISH_REASON_STOP,
}
FAILURES = {
    FinishReason.CANCELLED: (RequestCancelled, "the request was cancelled"),
    FinishReason.DEADLINE: (DeadlineExceeded, "the request's deadline passed"),
    FinishReason.CAPACITY: (CapacityExceeded, "a smaller pool has come, which can never hold prompt and output"),
    FinishReason.ERROR: (RequestFailed, "the request was given up; the server's log says why"),
}


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """What a stream has to know of its request.

    client_request_id   as `Started` reports it
    num_prompt_tokens
    num_sequences
    ending_token_ids    EOS and stop ids: none of them comes but as the last token of a sequence
    stop, include_stop, min_tokens    as requested
    num_logprobs        for each token, its own included; 0: none
    num_prompt_logprobs the same of each prompt token but the first
    """

    client_request_id: str
    num_prompt_tokens: int
    num_sequences: int = 1
    ending_token_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    num_logprobs: int = 0
    num_prompt_logprobs: int = 0


class ResponseStream:
    """The engine's sink for one request, and the source of its messages. Both on the event loop's thread.

    new_detokenizer   called once for each sequence
    stop_sequence     called with the index of a sequence whose text has reached a stop string
    """

    def __init__(
        self,
        settings: StreamSettings,
        new_detokenizer: Callable[[], Detokenizer],
        stop_sequence: Callable[[int], None],
        metrics: RequestMetrics,
        turnstile: Turnstile,
    ) -> None:
        self._settings = settings
        self._stop_sequence = stop_sequence
        self._metrics = metrics
        self._turnstile = turnstile
        self._completions = [_Completion(index, settings, new_detokenizer()) for index in range(settings.num_sequences)]
        self._prompt_logprobs: PromptLogprobs | None = None
        if settings.num_prompt_logprobs:
            self._prompt_logprobs = PromptLogprobs(settings.num_prompt_logprobs)
        self._num_cached_tokens: int | None = None
        self._has_sent_started = False
        self._num_unsent = settings.num_sequences  # Finished messages
        self._failure: FinishReason | None = None
        self._has_news = False
        self._ticket: asyncio.Future[int] | None = None  # of a reader that waits

    @property
    def log_fields(self) -> dict[str, str]:
        """Of a line that is about this request."""
        return {**self._metrics.exemplar, "request_id": self._settings.client_request_id}

    # --- from the engine: quick, and never raises ---------------------------------------------------------------

    def started(self, num_cached_tokens: int) -> None:
        self._num_cached_tokens = num_cached_tokens
        self._metrics.started(self._settings.num_prompt_tokens, num_cached_tokens)
        self._tell_reader()

    def prompt_logprobs(self, first_position: int, tokens: list[TokenLogprobs]) -> None:
        """Of the prompt tokens from a position on; what was told before ends there."""
        if self._prompt_logprobs is not None:
            try:
                self._prompt_logprobs.add(first_position, tokens)
            except Exception:
                self._fail()
                raise
            self._tell_reader()

    def tokens(self, index: int, token_ids: list[int], logprobs: list[TokenLogprobs] | None = None) -> None:
        """`logprobs`: of each of the tokens, where the request asked for them."""
        completion = self._completions[index]
        if completion.has_stopped:  # what was in flight then does not belong to it
            return
        try:
            completion.add(token_ids, logprobs)
        except Exception:
            self._fail()
            raise
        if not self._has_news:
            self._tell_reader()
        if completion.has_stopped:
            self._stop_sequence(index)

    def finished(self, index: int, reason: FinishReason, num_preemptions: int, score: float | None = None) -> None:
        """`score`: of a beam."""
        if reason in FAILURES:
            self._failure = reason
            self._count_rest()
            self._metrics.ended(reason)
        else:
            completion = self._completions[index]
            completion.finish(reason, num_preemptions, score)
            self._count(completion)
            self._metrics.finished(index, completion.reason or reason, completion.num_tokens, num_preemptions)
        self._tell_reader()

    def _fail(self) -> None:
        """By a bug. The engine, which hears of it, tells this stream nothing more; its reader has to know."""
        self._failure = FinishReason.ERROR
        self._count_rest()
        self._metrics.ended(FinishReason.ERROR)
        self._tell_reader()

    def close(self) -> None:
        """Nobody reads any more: what was not taken is counted all the same."""
        self._count_rest()

    def _count_rest(self) -> None:
        for completion in self._completions:
            self._count(completion)

    def _tell_reader(self) -> None:
        if not self._has_news:
            self._has_news = True
            if self._ticket is not None:
                self._turnstile.enter(self._ticket)

    def _count(self, completion: "_Completion") -> None:
        """Tokens are counted when they leave, all of a message together, or when no more will."""
        if num_tokens := completion.num_tokens - completion.num_counted:
            completion.num_counted = completion.num_tokens
            self._metrics.tokens(completion.index, num_tokens)

    # --- to the client --------------------------------------------------------------------------------------------

    async def messages(self) -> AsyncGenerator[wire.GenerateResponse, None]:
        """Started, PromptLogprobs, Deltas, a Finished for each sequence; ends after the last of these.

        Raises RequestCancelled, DeadlineExceeded, CapacityExceeded or RequestFailed if the engine ended the request
        without a result; all that was ready before has then been sent.
        """
        while True:
            group = await self._turn()
            try:
                # Before anything is looked at: what comes while a message is being taken is seen in the next round.
                self._has_news = False
                failure = self._failure
                for message in self._ready():
                    yield message
            finally:
                self._turnstile.leave(group)
            if failure is not None:
                error, words = FAILURES[failure]
                raise error(words)
            if self._num_unsent == 0:
                return

    async def _turn(self) -> int:
        """Waits until there is news and it is this stream's turn to take it. Returns what the turnstile takes back."""
        ticket: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._ticket = ticket
        if self._has_news:
            self._turnstile.enter(ticket)
        try:
            return await ticket
        except asyncio.CancelledError:
            if ticket.done() and not ticket.cancelled():  # called just now
                self._turnstile.leave(ticket.result())
            raise
        finally:
            self._ticket = None

    def _ready(self) -> Iterator[wire.GenerateResponse]:
        if self._num_cached_tokens is None:
            return
        if not self._has_sent_started:
            self._has_sent_started = True
            yield wire.GenerateResponse(
                started=wire.Started(
                    request_id=self._settings.client_request_id,
                    prompt_tokens=self._settings.num_prompt_tokens,
                    cached_tokens=self._num_cached_tokens,
                )
            )
        if self._prompt_logprobs is not None:
            while (prompt_logprobs := self._prompt_logprobs.take()) is not None:
                yield wire.GenerateResponse(prompt_logprobs=prompt_logprobs)
        for completion in self._completions:
            # Asked first: what ends while its Delta is being sent may have got more tokens in the meantime.
            has_ended = completion.reason is not None and not completion.is_reported
            for _ in range(completion.num_messages):
                delta = completion.take()
                if delta is not None:
                    self._count(completion)
                    yield wire.GenerateResponse(delta=delta)
            if has_ended:
                completion.is_reported = True
                self._num_unsent -= 1
                yield wire.GenerateResponse(finished=self._finished(completion, self._num_cached_tokens))

    def _finished(self, completion: "_Completion", num_cached_tokens: int) -> wire.Finished:
        usage = wire.Usage(
            prompt_tokens=self._settings.num_prompt_tokens,
            completion_tokens=completion.num_tokens,
            cached_tokens=num_cached_tokens,
            num_preemptions=completion.num_preemptions,
        )
        return wire.Finished(
            index=completion.index,
            reason=FINISH_REASONS[completion.reason or FinishReason.STOP],
            usage=usage,
            score=completion.score,
        )


class _Completion:
    """One sequence's output: what of it has not been taken, and how it ended.

    num_tokens    of the completion, taken or not
    num_counted   of these, by the metrics
    has_stopped   its text has reached a stop string; no token is added any more
    reason        why it ended, once it has
    score         of a beam
    is_reported   its Finished has been sent
    """

    __slots__ = (
        "_detokenizer",
        "_ending_token_ids",
        "_include_stop",
        "_logprobs",
        "_matcher",
        "_most",
        "_text",
        "_token_ids",
        "has_stopped",
        "index",
        "is_reported",
        "num_counted",
        "num_preemptions",
        "num_tokens",
        "reason",
        "score",
    )

    def __init__(self, index: int, settings: StreamSettings, detokenizer: Detokenizer) -> None:
        self.index = index
        self.num_tokens = 0
        self.num_counted = 0
        self.num_preemptions = 0
        self.has_stopped = False
        self.reason: FinishReason | None = None
        self.score: float | None = None
        self.is_reported = False
        self._detokenizer = detokenizer
        self._ending_token_ids = settings.ending_token_ids
        self._include_stop = settings.include_stop
        self._matcher: StopMatcher | None = None
        if settings.stop:
            self._matcher = StopMatcher(
                settings.stop, include_stop=settings.include_stop, min_tokens=settings.min_tokens
            )
        self._token_ids = array("I")  # not taken yet
        self._text: list[str] = []  # not taken yet; of all tokens with stop strings, else of none
        self._logprobs: LogprobBuffer | None = None  # of the tokens not taken yet
        self._most = 0  # tokens of a message with log-probabilities
        if settings.num_logprobs:
            self._logprobs = LogprobBuffer(settings.num_logprobs)
            self._most = MAX_LOGPROBS // settings.num_logprobs

    def add(self, token_ids: list[int], logprobs: list[TokenLogprobs] | None) -> None:
        """Those up to a stop string belong to the completion. Raises ValueError if log-probabilities are missing."""
        num_before = self.num_tokens
        self._add(token_ids)
        if self._logprobs is not None:
            self._logprobs.extend((logprobs or [])[: self.num_tokens - num_before])
            if len(self._logprobs) != len(self._token_ids):
                raise ValueError("tokens without log-probabilities, which were asked for")

    def _add(self, token_ids: list[int]) -> None:
        if self._matcher is None:
            self._token_ids.extend(token_ids)
            self.num_tokens += len(token_ids)
        else:
            for token_id in token_ids:
                self._token_ids.append(token_id)
                self.num_tokens += 1
                self._text.append(self._matcher.feed(self._decode([token_id])))
                if self._matcher.has_matched:
                    self.has_stopped = True
                    break

    def finish(self, reason: FinishReason, num_preemptions: int, score: float | None) -> None:
        self.num_preemptions = num_preemptions
        self.score = score
        if self._matcher is not None and not self.has_stopped:
            self._text.append(self._matcher.flush(self._detokenizer.flush()))
            self.has_stopped = self._matcher.has_matched
        self.reason = FinishReason.STOP if self.has_stopped else reason

    @property
    def num_messages(self) -> int:
        """How often to take, for all that is new."""
        return 1 if self._logprobs is None else max(1, -(-len(self._token_ids) // self._most))

    def take(self) -> wire.Delta | None:
        """All that is new, as far as it fits a message; None if nothing is."""
        if self._logprobs is None:
            token_ids, self._token_ids = self._token_ids, array("I")
        else:
            token_ids = self._token_ids[: self._most]
            del self._token_ids[: self._most]
        if self._matcher is not None:
            text = "".join(self._text)
            self._text.clear()
        else:
            text = self._decode(token_ids)
            if self.reason is not None and not self._token_ids:
                text += self._detokenizer.flush()
        if not token_ids and not text:
            return None
        logprobs = self._logprobs.take(len(token_ids)) if self._logprobs is not None else ()
        return wire.Delta(index=self.index, text=text, token_ids=token_ids, logprobs=logprobs)

    def _decode(self, token_ids: Sequence[int]) -> str:
        # They come as the last token of a sequence, or not at all.
        if token_ids and token_ids[-1] in self._ending_token_ids and not self._include_stop:
            token_ids = token_ids[:-1]
        return self._detokenizer.decode(token_ids)
