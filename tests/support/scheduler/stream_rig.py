"""A response stream with a small tokenizer, and the engine's side of it."""

import asyncio
from typing import Any

from quire.v1 import generation_pb2 as pb
from scheduler.core import FinishReason
from scheduler.requests.completion import Completion
from scheduler.requests.response_stream import ResponseStream
from scheduler.requests.stream_settings import StreamSettings
from scheduler.requests.write_queue import WriteQueue
from scheduler.telemetry.metrics import SchedulerMetrics
from scheduler.text.detokenizer import Vocabulary
from tests.support.scheduler import small_tokenizers
from tests.support.scheduler.fake_engine import made_up_logprobs

TOKENIZER = small_tokenizers.byte_level()
VOCABULARY = Vocabulary(TOKENIZER)
EOS = small_tokenizers.id_of(TOKENIZER, "</s>")


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


class Rig:
    """A stream and the engine's side of it. A stopped sequence ends at once, as in the engine."""

    def __init__(self, **settings: Any) -> None:
        self.metrics = SchedulerMetrics()
        write_queue = settings.pop("write_queue", None) or WriteQueue()
        num_sequences = settings.get("num_sequences", 1)
        self.stops: list[int] = []
        stream_settings = StreamSettings("client's", 10, **({"ending_token_ids": frozenset([EOS])} | settings))
        self.stream = ResponseStream(
            stream_settings,
            [Completion(index, stream_settings, VOCABULARY.detokenizer()) for index in range(num_sequences)],
            self._stop,
            self.metrics.request(num_sequences, self.metrics.clock()),
            write_queue,
        )

    def _stop(self, index: int) -> None:
        self.stops.append(index)
        self.stream.finished(index, FinishReason.STOP, 0)

    def run(self, token_ids: list[int], reason: FinishReason = FinishReason.LENGTH, index: int = 0) -> "Rig":
        num_logprobs = self.stream._settings.num_logprobs
        for token_id in token_ids:
            if index not in self.stops:
                logprobs = [made_up_logprobs(token_id, num_logprobs)] if num_logprobs else None
                self.stream.tokens(index, [token_id], logprobs)
        if index not in self.stops:
            self.stream.finished(index, reason, 0)
        return self

    async def messages(self, received: list[pb.GenerateResponse] | None = None) -> list[pb.GenerateResponse]:
        """Returns all messages. They are also in `received` if it is given, even after an error."""
        received = [] if received is None else received
        async for message in self.stream.messages():
            received.append(message)
        return received


async def read_now_and_then(rig: Rig, token_ids: list[int], reads: list[bool]) -> list[pb.GenerateResponse]:
    """Emits the tokens one by one, and lets the reader run after those where `reads` is true. Returns all messages."""
    num_logprobs = rig.stream._settings.num_logprobs
    reader = asyncio.create_task(rig.messages())
    for token_id, is_read in zip(token_ids, reads, strict=False):
        if not rig.stops:
            rig.stream.tokens(0, [token_id], [made_up_logprobs(token_id, num_logprobs)] if num_logprobs else None)
        if is_read:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
    if not rig.stops:
        rig.stream.finished(0, FinishReason.LENGTH, 0)
    return await reader


def started_rig(**settings: Any) -> Rig:
    rig = Rig(**settings)
    rig.stream.started(4)
    return rig


def text_of(messages: list[pb.GenerateResponse], index: int = 0) -> str:
    return "".join(m.delta.text for m in messages if m.HasField("delta") and m.delta.index == index)


def tokens_of(messages: list[pb.GenerateResponse], index: int = 0) -> list[int]:
    return [i for m in messages if m.HasField("delta") and m.delta.index == index for i in m.delta.token_ids]
