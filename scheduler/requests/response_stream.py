"""Streams the output of one request: tokens arrive from the engine, and messages leave as fast as the client reads.

    engine ── started, prompt_logprobs, tokens, finished ──► ResponseStream ── messages() ──► one gRPC stream
                                                                            └─ take() ──► a stream of many requests

**Messages coalesce.** A message carries all output that is ready when the client can accept it and it is the stream's
turn (`write_queue.py`). A slow client therefore gets fewer messages; the memory for it is bounded by its own output:
four bytes for each token, its text if there are stop strings, and twelve bytes for each requested log-probability. A
busy server sends fewer messages instead of sending each one late. A message has at most MAX_LOGPROBS log-probabilities,
so that every client can receive it.

**Tokens are detokenised when they are sent.** With stop strings they are detokenised at once, so that a sequence does
not run on past its stop string because its client reads slowly.

**What a Delta reports.** `token_ids` are all tokens of the completion. The EOS or stop id that ended it, and the token
that completed a stop string, belong to it; tokens computed after that do not, and are not counted anywhere. Without
`include_stop` the last tokens can therefore have text that `text` lacks. EOS and stop ids have text only with
`include_stop`, and only if they are not special tokens. `logprobs` match `token_ids` one by one; neither waits for text
that is held back.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator

from quire.v1 import generation_pb2 as pb
from scheduler.core import CapacityExceeded, FinishReason, QueueFull, TokenLogprobs
from scheduler.requests.completion import Completion
from scheduler.requests.logprob_buffer import PromptLogprobs
from scheduler.requests.status import DeadlineExceeded, GrammarFailed, RequestCancelled, RequestFailed
from scheduler.requests.stream_settings import StreamSettings
from scheduler.requests.write_queue import WriteQueue
from scheduler.telemetry.request_metrics import RequestMetrics

FINISH_REASONS = {
    FinishReason.EOS: pb.FINISH_REASON_EOS,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
}
FAILURES = {
    FinishReason.CANCELLED: (RequestCancelled, "the request was cancelled"),
    FinishReason.DEADLINE: (DeadlineExceeded, "the request's deadline passed"),
    FinishReason.TOO_LATE: (QueueFull, "the request would miss its deadline: it has waited for too long"),
    FinishReason.CAPACITY: (CapacityExceeded, "the new pool is too small for the prompt and its output"),
    FinishReason.MODEL_CHANGED: (
        RequestFailed,
        "the executor came back with other weights: the rest of the text would come from another model",
    ),
    FinishReason.NOT_FINITE: (RequestFailed, "the model returned numbers that are not finite"),
    FinishReason.GRAMMAR: (
        GrammarFailed,
        "structured_output: the grammar cannot be followed: that is too expensive, or no token fits",
    ),
    FinishReason.EXECUTORS_LOST: (
        RequestFailed,
        "executors in a row were lost while it ran without another request beside it: it is probably the cause",
    ),
    FinishReason.ERROR: (RequestFailed, "the request failed inside the server; see the server's log"),
}


class ResponseStream:
    """Receives the output of one request from the engine, and makes the messages for its client.

    Both sides use it on the event loop's thread.

    completions       one for each sequence; those of a resumed stream have replayed what the client has received
    stop_sequence     called with the index of a sequence whose text has reached a stop string
    """

    def __init__(
        self,
        settings: StreamSettings,
        completions: list[Completion],
        stop_sequence: Callable[[int], None],
        metrics: RequestMetrics,
        write_queue: WriteQueue,
    ) -> None:
        self._settings = settings
        self._stop_sequence = stop_sequence
        self._metrics = metrics
        self._write_queue = write_queue
        self._completions = completions
        self._prompt_logprobs: PromptLogprobs | None = None
        if settings.num_prompt_logprobs:
            self._prompt_logprobs = PromptLogprobs(settings.num_prompt_logprobs, settings.token_bytes)
        self._num_cached_tokens: int | None = None
        self._has_sent_started = False
        # Sequences whose Finished message was not sent.
        self._num_unfinished = sum(not completion.is_reported for completion in completions)
        self._failure: FinishReason | None = None
        self._has_news = False
        self._turn: asyncio.Future[int] | None = None  # set while `messages` waits
        self._on_news: Callable[[], None] | None = None  # set instead if `messages` is not used
        self.has_ended = False

    def begin_resumed(self) -> None:
        """Called for a stream whose client has received output: nothing is left to wait for before `Started`."""
        self._num_cached_tokens = self._settings.num_cached_tokens
        for completion in self._completions:
            if completion.reason is not None:
                self._metrics.finished(completion.index, completion.reason, 0)
        if not self._num_unfinished:
            self._metrics.ended(FinishReason.STOP)  # the client has the reasons from an earlier stream
        self._notify_reader()

    @property
    def log_fields(self) -> dict[str, str]:
        """Fields of log records about this request."""
        return {**self._metrics.exemplar, "request_id": self._settings.client_request_id}

    # --- called by the engine: these return quickly, and raise only for bugs ------------------------------------------

    def started(self, num_cached_tokens: int) -> None:
        """Called when the first step of the request is done."""
        known = self._settings.num_cached_tokens
        self._num_cached_tokens = num_cached_tokens if known is None else known
        self._metrics.started(
            self._settings.num_prompt_tokens, min(num_cached_tokens, self._settings.num_prompt_tokens)
        )
        self._notify_reader()

    def prompt_logprobs(self, first_position: int, tokens: list[TokenLogprobs]) -> None:
        """Adds log-probabilities of prompt tokens; `first_position` is where the previous ones ended."""
        if self._prompt_logprobs is not None:
            try:
                self._prompt_logprobs.add(first_position, tokens)
            except Exception:
                self.fail()
                raise
            self._notify_reader()

    def tokens(self, index: int, token_ids: list[int], logprobs: list[TokenLogprobs] | None = None) -> None:
        """Adds tokens of a sequence, with the log-probabilities of each if the request asked for them."""
        completion = self._completions[index]
        if completion.has_stopped:  # tokens in flight at the stop string do not belong to the completion
            return
        try:
            completion.add(token_ids, logprobs)
        except Exception:
            self.fail()
            raise
        if not self._has_news:
            self._notify_reader()
        if completion.has_stopped:
            self._stop_sequence(index)

    def finished(self, index: int, reason: FinishReason, num_preemptions: int, score: float | None = None) -> None:
        """Ends a sequence, or the whole request if `reason` is a failure. Beams have a score."""
        if reason in FAILURES:
            self._failure = reason
            self._notify_reader()  # first, because counting may fail too
            self._count_rest()
            self._metrics.ended(reason)
        else:
            completion = self._completions[index]
            completion.finish(reason, num_preemptions, score)
            self._count(completion)
            num_new = completion.num_tokens - completion.num_replayed
            if score is not None and not num_new:
                completion.take()  # a beam that the client of a resumed stream has received with all its text
            self._metrics.finished(index, completion.reason or reason, num_new, num_preemptions)
        self._notify_reader()

    def fail(self) -> None:
        """Ends the request after a bug; the engine receives the exception, and the client an error."""
        self._failure = FinishReason.ERROR
        self._count_rest()
        self._metrics.ended(FinishReason.ERROR)
        self._notify_reader()

    def close(self) -> None:
        """Called when the client stops reading; counts the tokens that were not sent."""
        self._count_rest()

    def _count_rest(self) -> None:
        for completion in self._completions:
            self._count(completion)

    def _notify_reader(self) -> None:
        if not self._has_news:
            self._has_news = True
            if self._turn is not None:
                self._write_queue.enter(self._turn, is_first=not self._has_sent_started)
            elif self._on_news is not None:
                self._on_news()

    def _count(self, completion: Completion) -> None:
        """Counts tokens in the metrics: all tokens of a message when it leaves, or the rest at the end."""
        if num_tokens := completion.num_tokens - completion.num_counted:
            completion.num_counted = completion.num_tokens
            self._metrics.tokens(completion.index, num_tokens)

    # --- called by the server -----------------------------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        """True if there is output, or an end, that `take` has not begun to return."""
        return self._has_news

    def follow(self, on_news: Callable[[], None]) -> None:
        """Has `on_news` called when `has_news` becomes true, or at once if it is true. `messages` is not used then."""
        self._on_news = on_news
        if self._has_news:
            on_news()

    def take(self, new: Callable[[], pb.GenerateResponse]) -> Iterator[pb.GenerateResponse]:
        """Yields the messages that are ready: Started, PromptLogprobs, Deltas, and a Finished for each sequence.

        Sets `has_ended` after the last Finished. Each message is made with `new`, when it is asked for: output that
        arrives meanwhile can be part of it, or sets `has_news` again. Raises RequestCancelled, DeadlineExceeded,
        CapacityExceeded or RequestFailed if the engine ended the request without a result, after all messages that
        were ready before; after a bug (ERROR), no more of them are sent.
        """
        self._has_news = False
        failure = self._failure
        yield from self._ready(new)
        if failure is not None:
            error, text = FAILURES[failure]
            raise error(text)
        self.has_ended = self._num_unfinished == 0

    async def messages(self) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Yields the messages of `take` until the stream has ended, whenever it has news and its turn. Raises the
        errors of `take`."""
        while not self.has_ended:
            group = await self._wait_for_turn()
            try:
                for message in self.take(pb.GenerateResponse):
                    yield message
            finally:
                self._write_queue.leave(group)

    async def _wait_for_turn(self) -> int:
        """Waits until there is output and this stream may write. Returns the group to pass to `WriteQueue.leave`."""
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._turn = turn
        if self._has_news:
            self._write_queue.enter(turn, is_first=not self._has_sent_started)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the turn came just before the cancellation
                self._write_queue.leave(turn.result())
            raise
        finally:
            self._turn = None

    def _ready(self, new: Callable[[], pb.GenerateResponse]) -> Iterator[pb.GenerateResponse]:
        if self._num_cached_tokens is None:
            return
        if not self._has_sent_started:
            self._has_sent_started = True
            message = new()
            message.started.CopyFrom(self._started(self._num_cached_tokens))
            yield message
        if self._prompt_logprobs is not None:
            while (prompt_logprobs := self._prompt_logprobs.take()) is not None:
                message = new()
                message.prompt_logprobs.CopyFrom(prompt_logprobs)
                yield message
        for completion in self._completions:
            # Read first: a sequence that ends while its Delta is written may have received more tokens.
            has_ended = completion.reason is not None and not completion.is_reported
            for _ in range(completion.num_messages):
                if self._failure is FinishReason.ERROR:
                    return  # the end of a sequence may not have been told, and its last token leaves with its last text
                delta = completion.take(new)
                if delta is not None:
                    self._count(completion)
                    yield delta
            if has_ended:
                completion.is_reported = True
                self._num_unfinished -= 1
                message = new()
                message.finished.CopyFrom(self._finished(completion, self._num_cached_tokens))
                yield message

    def _started(self, num_cached_tokens: int) -> pb.Started:
        new_continuation = self._settings.new_continuation
        return pb.Started(
            request_id=self._settings.client_request_id,
            prompt_tokens=self._settings.num_prompt_tokens,
            cached_tokens=num_cached_tokens,
            continuation=new_continuation(num_cached_tokens) if new_continuation else None,
            follows_grammar=self._settings.follows_grammar,
        )

    def _finished(self, completion: Completion, num_cached_tokens: int) -> pb.Finished:
        usage = pb.Usage(
            prompt_tokens=self._settings.num_prompt_tokens,
            completion_tokens=completion.num_tokens,
            cached_tokens=num_cached_tokens,
            num_preemptions=completion.num_preemptions,
        )
        return pb.Finished(
            index=completion.index,
            reason=FINISH_REASONS[completion.reason or FinishReason.STOP],
            usage=usage,
            score=completion.score,
        )
