"""Streaming clients in a closed loop that share calls of GenerateMany, as the clients of gateways do."""

import asyncio
import time
from collections import defaultdict
from typing import TYPE_CHECKING, TypeAlias

import grpc.aio

from bench.overhead.stream_load import Clients, Delta, Load, Period, Received, ShellCostError, open_channels
from quire.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    from google.protobuf.message import Message

_METHOD = "/quire.v1.Generation/GenerateMany"

Call: TypeAlias = "grpc.aio.StreamStreamCall[Message, pb.GenerateManyResponse]"


async def run_in_calls(clients: Clients, num_calls: int, load: Load, period: Period) -> list[list[Delta]]:
    """Does what `clients.run` does, with clients that share calls, each call on a connection of its own.

    Raises ShellCostError if a stream is not correct.
    """
    num_calls = min(num_calls, load.num_clients)
    shares = [len(range(first, load.num_clients, num_calls)) for first in range(num_calls)]
    async with open_channels(clients.address, num_calls) as channels:
        calls = [
            _SharedCall(clients, channel, num_clients, load, period)
            for channel, num_clients in zip(channels, shares, strict=True)
        ]
        await asyncio.gather(*[call.run() for call in calls])
    return [clients.check(received, load.num_tokens) for call in calls for received in call.received()]


class _SharedCall:
    """One call. Stream k of client c has the id k · num_clients + c."""

    def __init__(
        self, clients: Clients, channel: grpc.aio.Channel, num_clients: int, load: Load, period: Period
    ) -> None:
        self._clients = clients
        self._num_clients = num_clients
        self._load = load
        self._period = period
        self._call: Call = channel.stream_stream(
            _METHOD,
            request_serializer=pb.GenerateManyRequest.SerializeToString,
            response_deserializer=pb.GenerateManyResponse.FromString,
        )()
        self._num_left = [load.num_requests] * num_clients
        self._began: set[int] = set()
        self._responses: list[tuple[float, pb.GenerateManyResponse]] = []

    async def run(self) -> None:
        """Returns when all clients have received all their requests. Raises ShellCostError if a request fails."""
        for client in range(self._num_clients):
            await self._send(client)
        num_active = self._num_clients
        while num_active:
            response = await self._call.read()
            if not isinstance(response, pb.GenerateManyResponse):
                raise ShellCostError("the call ended before its requests")
            self._responses.append((time.perf_counter(), response))
            for message in response.messages:
                stream_id = message.stream_id
                if stream_id < self._num_clients and stream_id not in self._began:
                    self._began.add(stream_id)
                    self._period.client_began()
                if message.HasField("ended"):
                    num_active -= not await self._go_on(stream_id, message.ended)
        await self._call.done_writing()

    async def _go_on(self, stream_id: int, ended: pb.Ended) -> bool:
        """Sends the next request of a stream's client. Returns False if there is none."""
        if ended.code:
            raise ShellCostError(f"a request failed: {ended.message}")
        client = stream_id % self._num_clients
        if not self._num_left[client]:
            self._period.client_ended()
            return False
        await self._send(stream_id + self._num_clients)
        return True

    async def _send(self, stream_id: int) -> None:
        self._num_left[stream_id % self._num_clients] -= self._period.has_begun
        opening = pb.OpenStream(request=self._clients.new_request(self._load.num_tokens))
        await self._call.write(pb.GenerateManyRequest(stream_id=stream_id, open=opening))

    def received(self) -> list[Received]:
        """Returns what each stream has received."""
        streams: defaultdict[int, Received] = defaultdict(Received)
        for time_s, response in self._responses:
            for message in response.messages:
                if message.HasField("response"):
                    streams[message.stream_id].messages.append(message.response.SerializeToString())
                    streams[message.stream_id].times_s.append(time_s)
        return list(streams.values())
