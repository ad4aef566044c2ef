"""Buffers the output of one sequence between the engine and the messages to the client."""

from array import array
from collections.abc import Callable, Sequence

from quire.v1 import generation_pb2 as pb
from scheduler.core import FinishReason, TokenLogprobs
from scheduler.requests.logprob_buffer import MAX_LOGPROBS, LogprobBuffer
from scheduler.requests.stream_settings import StreamSettings
from scheduler.text.detokenizer import Detokenizer
from scheduler.text.stop_strings import StopMatcher


class Completion:
    """The output of one sequence that was not sent yet, and how the sequence ended.

    num_tokens        tokens of the completion, sent or not
    num_counted       tokens of these that the metrics have counted
    num_replayed      tokens of these that the client has received in an earlier stream
    num_preemptions
    has_stopped       the text has reached a stop string, so no more tokens are added
    reason            why it ended; None while it runs
    score             of a beam
    is_reported       its Finished message was sent
    """

    __slots__ = (
        "_detokenizer",
        "_hidden_token_ids",
        "_logprobs",
        "_matcher",
        "_max_tokens",
        "_text",
        "_token_ids",
        "has_stopped",
        "index",
        "is_reported",
        "num_counted",
        "num_preemptions",
        "num_replayed",
        "num_tokens",
        "reason",
        "score",
    )

    def __init__(self, index: int, settings: StreamSettings, detokenizer: Detokenizer) -> None:
        self.index = index
        self.num_tokens = 0
        self.num_counted = 0
        self.num_replayed = 0
        self.num_preemptions = 0
        self.has_stopped = False
        self.reason: FinishReason | None = None
        self.score: float | None = None
        self.is_reported = False
        self._detokenizer = detokenizer
        self._hidden_token_ids = settings.ending_token_ids
        if settings.include_stop:
            self._hidden_token_ids &= settings.nameless_token_ids
        self._matcher: StopMatcher | None = None
        if settings.stop:
            self._matcher = StopMatcher(
                settings.stop, include_stop=settings.include_stop, min_tokens=settings.min_tokens
            )
        # Not taken yet. With stop strings `_text` has a text for each of `_token_ids`, and another one if text was held
        # back at the end; otherwise it is empty.
        self._token_ids = array("I")
        self._text: list[str] = []
        self._logprobs: LogprobBuffer | None = None
        self._max_tokens = 0  # in a message with log-probabilities
        if settings.num_logprobs:
            self._logprobs = LogprobBuffer(settings.num_logprobs, settings.token_bytes)
            self._max_tokens = MAX_LOGPROBS // settings.num_logprobs

    def add(self, token_ids: list[int], logprobs: list[TokenLogprobs] | None) -> None:
        """Adds the tokens up to a stop string. Raises ValueError if requested log-probabilities are missing."""
        num_before = self.num_tokens
        self._add(token_ids)
        if self._logprobs is not None:
            self._logprobs.extend((logprobs or [])[: self.num_tokens - num_before])
            if len(self._logprobs) != len(self._token_ids):
                raise ValueError("tokens without the requested log-probabilities")

    def _add(self, token_ids: Sequence[int]) -> None:
        if self._matcher is None:
            self._token_ids.extend(token_ids)
            self.num_tokens += len(token_ids)
            return
        for token_id in token_ids:
            self._token_ids.append(token_id)
            self.num_tokens += 1
            self._text.append(self._matcher.feed(self._decode([token_id])))
            if self._matcher.has_matched:
                self.has_stopped = True
                break

    def replay(self, token_ids: Sequence[int]) -> None:
        """Adds tokens that the client has received, and takes them. A stop string leaves the rest of them out."""
        if self.has_stopped:
            return
        self._add(token_ids)
        if self._matcher is None:
            self._decode(token_ids)
        self._token_ids = array("I")
        self._text.clear()
        self.num_counted = self.num_replayed = self.num_tokens

    def finish(self, reason: FinishReason, num_preemptions: int, score: float | None) -> None:
        """Ends the completion. Text that was held back can still contain a stop string."""
        self.num_preemptions = num_preemptions
        self.score = score
        if self._matcher is not None and not self.has_stopped:
            self._text.append(self._matcher.flush(self._detokenizer.flush()))
            self.has_stopped = self._matcher.has_matched
        self.reason = FinishReason.STOP if self.has_stopped else reason

    @property
    def num_messages(self) -> int:
        """Number of `take` calls needed to return all new output."""
        return 1 if self._logprobs is None else max(1, -(-len(self._token_ids) // self._max_tokens))

    def take(self, new: Callable[[], pb.GenerateResponse] = pb.GenerateResponse) -> pb.GenerateResponse | None:
        """Returns a message with new output, as much as fits into one, or None if there is none.

        new  makes an empty message. The output is written into its Delta directly, which takes a third of the time of a
             Delta that is copied
        """
        if self._logprobs is None:
            token_ids, self._token_ids = self._token_ids, array("I")
        else:
            token_ids = self._token_ids[: self._max_tokens]
            del self._token_ids[: self._max_tokens]
        if self._matcher is not None:
            # A text leaves with its own token, and the text at the end with the last one.
            num_texts = len(token_ids) if self._token_ids else len(self._text)
            text = "".join(self._text[:num_texts])
            del self._text[:num_texts]
        else:
            text = self._decode(token_ids)
            if self.reason is not None and not self._token_ids:
                text += self._detokenizer.flush()
        if not token_ids and not text:
            return None
        message = new()
        delta = message.delta
        delta.index = self.index
        delta.text = text
        delta.token_ids.extend(token_ids)
        if self._logprobs is not None:
            delta.logprobs.extend(self._logprobs.take(len(token_ids)))
        if self.reason is not None and not self._token_ids:
            delta.last = True
        return message

    def _decode(self, token_ids: Sequence[int]) -> str:
        # An ending token can only be the last token of a sequence.
        if token_ids and token_ids[-1] in self._hidden_token_ids:
            token_ids = token_ids[:-1]
        return self._detokenizer.decode(token_ids)
