"""Brings the text of a resumed stream to the place where the client's copy ends, without sending any of it.

    received tokens ──► Completion.replay ──► text, stop strings and counts as they were when the stream broke off

A sequence that its received tokens have already ended gets its `Finished` at once; the executor does not see it.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from scheduler.core import FinishReason, InvalidRequest, Request
from scheduler.requests.completion import Completion
from scheduler.text.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Callable

    from scheduler.core import TokenLogprobs
    from scheduler.requests.response_stream import ResponseStream
    from scheduler.requests.resumption import ReceivedSequence
    from scheduler.requests.stream_settings import StreamSettings
    from scheduler.text.detokenizer import Detokenizer

log = logging.getLogger(__name__)

CHUNK = 32
"""Tokens that are replayed at a time. Between two chunks other streams are served."""

MAX_TOKENS = 1 << 24
"""Tokens of streams that wait to be replayed, of which a tenant has a quarter at most."""


@dataclass(frozen=True, slots=True)
class Replay:
    """The sequences of a resumed request, in order of index, and what was received of each."""

    completions: list[Completion]
    outputs: tuple[ReceivedSequence, ...]

    def rest_of(self, request: Request, num_prompt_logprobs: int) -> Request:
        """Ends the completions that need no more tokens, and returns the request for the others.

        Its client has received `num_prompt_logprobs` entries. A beam search starts again.
        """
        if request.beam is not None:
            return replace(request, is_resumed=True)
        for completion, output in zip(self.completions, self.outputs, strict=True):
            if not output.is_finished:
                _end_if_complete(completion, output, request)
        outputs = tuple(
            replace(output, is_finished=output.is_finished or completion.reason is not None)
            for completion, output in zip(self.completions, self.outputs, strict=True)
        )
        if not any(output.token_ids or output.is_finished for output in outputs):
            outputs = ()  # the samples are forked from one prompt, as if nothing had been received
        return replace(request, outputs=outputs, is_resumed=True, num_prompt_reported=num_prompt_logprobs)

    @property
    def num_unreported(self) -> int:
        """Number of sequences whose Finished message the client has not received."""
        return sum(not completion.is_reported for completion in self.completions)

    @property
    def has_rest(self) -> bool:
        """True if some sequence needs more tokens."""
        return any(completion.reason is None and not completion.is_reported for completion in self.completions)


class Replays:
    """Replays one stream after the other, because all of them use the event loop. Tenants take turns."""

    def __init__(self) -> None:
        self._turns = Turns(1, large=MAX_TOKENS, max_size=MAX_TOKENS, max_size_of_a_tenant=MAX_TOKENS // 4)

    async def replay(
        self,
        tenant: str,
        outputs: tuple[ReceivedSequence, ...],
        settings: StreamSettings,
        new_detokenizer: Callable[[], Detokenizer],
    ) -> Replay:
        """See `replay`. Raises QueueFull if too many tokens wait."""
        turn = await self._turns.take(tenant, sum(len(output.token_ids) for output in outputs))
        try:
            return await replay(outputs, settings, new_detokenizer)
        finally:
            turn.end()


async def replay(
    outputs: tuple[ReceivedSequence, ...], settings: StreamSettings, new_detokenizer: Callable[[], Detokenizer]
) -> Replay:
    """Replays the received output. Raises InvalidRequest if a sequence has tokens after a stop string."""
    completions = []
    for index, output in enumerate(outputs):
        completion = Completion(index, settings, new_detokenizer())
        completion.is_reported = output.is_finished
        completions.append(completion)
        for start in range(0, len(output.token_ids), CHUNK):
            completion.replay(output.token_ids[start : start + CHUNK])
            await asyncio.sleep(0)
        if completion.num_tokens < len(output.token_ids):
            problem = f"sequence {index} has {len(output.token_ids)} tokens, and a stop string ends it after "
            raise InvalidRequest({"resume.sequences": f"{problem}{completion.num_tokens}"})
    return Replay(completions, outputs)


def _end_if_complete(completion: Completion, output: ReceivedSequence, request: Request) -> None:
    """Ends a sequence that has all its tokens. Unless its last Delta was received, held-back text is to be sent."""
    params, token_ids = request.params, output.token_ids
    if not token_ids:
        return
    if token_ids[-1] in params.eos_token_ids:
        reason = FinishReason.EOS
    elif completion.has_stopped or token_ids[-1] in params.stop_token_ids:
        reason = FinishReason.STOP
    elif output.has_last or len(request.prompt_token_ids) + completion.num_tokens >= max(
        params.max_total_tokens, params.min_total_tokens
    ):
        reason = FinishReason.LENGTH  # also of a sequence that a smaller pool has ended, wherever it is continued
    else:
        return
    completion.finish(reason, 0, None)
    if output.has_last:
        completion.take()


class ResumedBeams:
    """Receives the result of a beam search that started again, and passes on what its client has not received."""

    def __init__(self, stream: ResponseStream, outputs: tuple[ReceivedSequence, ...]) -> None:
        self._stream = stream
        self._outputs = outputs
        self._has_failed = False

    @property
    def log_fields(self) -> dict[str, str]:
        return self._stream.log_fields

    def started(self, num_cached_tokens: int) -> None:
        self._stream.started(num_cached_tokens)

    def prompt_logprobs(self, first_position: int, tokens: list[TokenLogprobs]) -> None:
        self._stream.prompt_logprobs(first_position, tokens)

    def tokens(self, index: int, token_ids: list[int], logprobs: list[TokenLogprobs] | None = None) -> None:
        """Passes on the tokens of a beam after those that were received; fails the request if these are different."""
        output = self._outputs[index]
        num_received = len(output.token_ids)
        if output.is_finished or self._has_failed:
            return
        if token_ids[:num_received] != list(output.token_ids):
            log.warning("a beam search that started again found another beam %d", index, extra=self.log_fields)
            self._has_failed = True
            self._stream.fail()
        elif token_ids[num_received:]:
            self._stream.tokens(index, token_ids[num_received:], logprobs)

    def finished(self, index: int, reason: FinishReason, num_preemptions: int, score: float | None = None) -> None:
        if not self._has_failed and (score is None or not self._outputs[index].is_finished):
            self._stream.finished(index, reason, num_preemptions, score)
