"""Streaming clients in a closed loop, and the period in which all of them are active.

Clients keep the bytes that they receive and decode them after the clock has stopped. Then every stream is checked: its
tokens are counted, and its text is compared with the tokenizer's text for them.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import grpc.aio
import psutil
from tokenizers import Tokenizer

from bench.command_line import BenchError
from quire.v1 import generation_pb2 as pb

_METHOD = "/quire.v1.Generation/Generate"
_PROMPT_TOKENS = 16

Call: TypeAlias = "grpc.aio.UnaryStreamMultiCallable[bytes, bytes]"


class ShellCostError(BenchError):
    """A measurement cannot be made, or its streams were not correct."""


@dataclass(frozen=True, slots=True)
class Load:
    """The load of one run.

    num_tokens    tokens of output of each request
    num_requests  requests that each client sends, one after the other, once all clients are active; until then it
                  sends requests that do not count
    """

    num_clients: int
    num_tokens: int
    num_requests: int


@dataclass(slots=True)
class Received:
    """The stream of one request as it came: serialised GenerateResponses, and the time of each."""

    messages: list[bytes] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Delta:
    """A Delta of a stream that has been checked."""

    num_tokens: int
    time_s: float


class Period:
    """The time in which all clients are active, and the scheduler's CPU time in it."""

    def __init__(self, scheduler: psutil.Process, num_clients: int) -> None:
        self._scheduler = scheduler
        self._num_to_begin = num_clients
        self._has_ended = False
        self._begin = self._end = (0.0, 0.0)

    def client_began(self) -> None:
        """Called when a client receives its first message."""
        self._num_to_begin -= 1
        if self._num_to_begin == 0:
            self._begin = self._now()

    def client_ended(self) -> None:
        """Called when a client receives its last message."""
        if not self._has_ended:
            self._has_ended = True
            self._end = self._now()

    @property
    def has_begun(self) -> bool:
        """True once all clients are active."""
        return self._num_to_begin == 0

    def includes(self, time_s: float) -> bool:
        return self._begin[0] < time_s <= self._end[0]

    def overlap_s(self, stream: Sequence[Delta]) -> float:
        """Returns the seconds of the period in which a stream was open."""
        return max(0.0, min(stream[-1].time_s, self._end[0]) - max(stream[0].time_s, self._begin[0]))

    @property
    def wall_s(self) -> float:
        return self._end[0] - self._begin[0]

    @property
    def cpu_s(self) -> float:
        return self._end[1] - self._begin[1]

    def _now(self) -> tuple[float, float]:
        times = self._scheduler.cpu_times()
        return time.perf_counter(), times.user + times.system


class Clients:
    """The clients of one scheduler. No two prompts begin with the same token, so none finds another's prefix."""

    def __init__(self, address: str, tokenizer: Tokenizer) -> None:
        self.address = address
        self._tokenizer = tokenizer
        self._num_prompts = 0

    async def run(self, load: Load, period: Period) -> list[list[Delta]]:
        """Runs the load and returns the Deltas of every stream. Raises ShellCostError if a stream is not correct."""
        async with open_channels(self.address, load.num_clients) as channels:
            clients = await asyncio.gather(*[self._run_client(channel, load, period) for channel in channels])
        return [self.check(received, load.num_tokens) for client in clients for received in client]

    async def _run_client(self, channel: grpc.aio.Channel, load: Load, period: Period) -> list[Received]:
        call: Call = channel.unary_stream(_METHOD)  # bytes in, bytes out
        client: list[Received] = []
        num_left = load.num_requests
        while num_left:
            num_left -= period.has_begun
            received = Received()
            client.append(received)
            async for message in call(self.new_request(load.num_tokens).SerializeToString()):
                received.messages.append(message)
                received.times_s.append(time.perf_counter())
                if len(client) == len(received.messages) == 1:
                    period.client_began()
        period.client_ended()
        return client

    def new_request(self, num_tokens: int) -> pb.GenerateRequest:
        """Returns a request for so many tokens, with a new prompt."""
        self._num_prompts += 1
        vocab_size = self._tokenizer.get_vocab_size()
        ids = [(self._num_prompts // vocab_size**i) % vocab_size for i in range(_PROMPT_TOKENS)]
        return pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=ids),
            stopping=pb.StoppingParams(max_tokens=num_tokens, ignore_eos=True),
        )

    def check(self, received: Received, num_tokens: int) -> list[Delta]:
        """Returns the Deltas of a stream. Raises ShellCostError if it is not complete."""
        events = [pb.GenerateResponse.FromString(message) for message in received.messages]
        deltas = [
            (event.delta, time_s)
            for event, time_s in zip(events, received.times_s, strict=True)
            if event.HasField("delta")
        ]
        token_ids = [token_id for delta, _ in deltas for token_id in delta.token_ids]
        counts = (len(token_ids), events[-1].finished.usage.completion_tokens)
        if counts != (num_tokens, num_tokens):
            raise ShellCostError(f"expected {num_tokens} tokens, got {counts}")
        if "".join(delta.text for delta, _ in deltas) != self._tokenizer.decode(token_ids):
            raise ShellCostError("the text is not that of the token ids")
        return [Delta(len(delta.token_ids), time_s) for delta, time_s in deltas]


@asynccontextmanager
async def open_channels(address: str, num_clients: int) -> AsyncIterator[list[grpc.aio.Channel]]:
    """Yields connected channels, each with a connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(num_clients)]
    try:
        await asyncio.gather(*[channel.channel_ready() for channel in channels])
        yield channels
    finally:
        await asyncio.gather(*[channel.close() for channel in channels])
