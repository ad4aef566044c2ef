"""Goodput under overload: requests with deadlines, of which far more arrive than the server can serve.

    python -m bench overload                # three times the capacity, which is measured first

The capacity is the output of clients that send one request after the other, in tokens a second. Then requests arrive at
a constant rate, whatever becomes of the earlier ones. Goodput is the output of the requests that end within their
deadline: tokens of other requests are worth nothing. All other flags are those of `quire serve`.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.attacks.ordinary_requests import generate
from bench.command_line import BenchError, Parser, at_least
from bench.machine import describe_machine
from bench.report import save
from bench.server_process import quire_server
from quire.async_client import AsyncClient
from quire.errors import QuireError

_OUTPUT_TOKENS = 64
_WARM_UP_S = 2.0
_MAX_DURATION_S = 20.0
_MAX_REQUESTS = 20_000
IN_TIME = "in time"


@dataclass(frozen=True, slots=True)
class Overload:
    """Tokens a second. outcomes: number of requests that ended in time, and of the others by error.

    The goodput is that of requests that end while others arrive, after the warm-up.
    """

    capacity: float
    offered: float
    goodput: float
    deadline_s: float
    outcomes: dict[str, int]

    @property
    def goodput_ratio(self) -> float:
        return self.goodput / self.capacity


class _Output:
    """Counts tokens from the end of the warm-up on, for a time."""

    def __init__(self, duration_s: float) -> None:
        self._from_s = time.monotonic() + _WARM_UP_S
        self.end_s = self._from_s + duration_s
        self._duration_s = duration_s
        self._num_tokens = 0

    def add(self, num_tokens: int) -> None:
        if self._from_s <= time.monotonic() < self.end_s:
            self._num_tokens += num_tokens

    @property
    def tokens_per_s(self) -> float:
        return self._num_tokens / self._duration_s


async def measure(
    flags: Sequence[str], *, times: float, num_clients: int, duration_s: float, deadline_s: float
) -> Overload:
    """Measures capacity and goodput on one server. Raises BenchError if it has no capacity or the load is too large."""
    async with quire_server(flags) as server, AsyncClient(server.addresses["grpc"]) as client:
        capacity = await _capacity(client, num_clients, duration_s)
        if not capacity:
            raise BenchError("the server served no request without overload")
        rate = times * capacity / _OUTPUT_TOKENS
        num_requests = int(rate * (_WARM_UP_S + duration_s))
        if num_requests > _MAX_REQUESTS:
            raise BenchError(f"{num_requests} requests are more than {_MAX_REQUESTS}: use a shorter --duration-s")
        goodput, outcomes = await _goodput(client, rate, duration_s, deadline_s)
    return Overload(capacity, rate * _OUTPUT_TOKENS, goodput, deadline_s, dict(outcomes))


async def _capacity(client: AsyncClient, num_clients: int, duration_s: float) -> float:
    """Returns the tokens a second that clients without deadlines get, all together."""
    output = _Output(duration_s)

    async def loop(seed: int) -> None:
        rng = random.Random(seed)
        while time.monotonic() < output.end_s:
            async for num_tokens in generate(client, rng, _OUTPUT_TOKENS):
                output.add(num_tokens)

    async with asyncio.TaskGroup() as group:
        for seed in range(num_clients):
            group.create_task(loop(seed))
    return output.tokens_per_s


async def _goodput(
    client: AsyncClient, rate: float, duration_s: float, deadline_s: float
) -> tuple[float, Counter[str]]:
    """Sends `rate` requests a second; returns the tokens a second that ended in time, and how the requests ended."""
    output = _Output(duration_s)
    outcomes: Counter[str] = Counter()

    async def send(seed: int) -> None:
        sent_s, num_tokens = time.monotonic(), 0
        try:
            async for number in generate(client, random.Random(f"late {seed}"), _OUTPUT_TOKENS, timeout_s=deadline_s):
                num_tokens += number
        except QuireError as error:
            outcomes[type(error).__name__] += 1
            return
        if num_tokens == _OUTPUT_TOKENS and time.monotonic() - sent_s <= deadline_s:
            outcomes[IN_TIME] += 1
            output.add(num_tokens)
        else:
            outcomes["late"] += 1

    started_s, seed = time.monotonic(), 0
    async with asyncio.TaskGroup() as group:
        while (now_s := time.monotonic()) < output.end_s:
            while seed < rate * (now_s - started_s):
                group.create_task(send(seed))
                seed += 1
            await asyncio.sleep(1 / rate)
    return output.tokens_per_s, outcomes


def main(arguments: Sequence[str]) -> None:
    parser = Parser("overload", __doc__)
    parser.add_argument("--times", type=float, default=3.0, help="offered load, as a multiple of the capacity")
    parser.add_argument("--clients", type=at_least(1), default=64, help="clients that measure the capacity")
    parser.add_argument("--deadline-s", type=float, default=4.0, help="seconds from the sending of a request")
    parser.add_argument("--duration-s", type=float, default=15.0, help="seconds of each of the two measurements")
    parser.add_argument("--json", type=Path, help="file of results")
    given, flags = parser.parse_known_args(arguments)
    if not 0 < given.duration_s <= _MAX_DURATION_S or given.times <= 0 or given.deadline_s <= 0:
        raise BenchError(f"--times and --deadline-s must be positive, and --duration-s at most {_MAX_DURATION_S:.0f}")
    result = asyncio.run(
        measure(
            flags,
            times=given.times,
            num_clients=given.clients,
            duration_s=given.duration_s,
            deadline_s=given.deadline_s,
        )
    )
    print(f"capacity: {result.capacity:.0f} tokens/s; offered: {result.offered:.0f} tokens/s")
    print(", ".join(f"{outcome}: {number}" for outcome, number in sorted(result.outcomes.items())))
    print(f"goodput: {result.goodput:.0f} tokens/s, {result.goodput_ratio:.1%} of the capacity")
    if given.json is not None:
        import torch

        report = asdict(result) | {"goodput_ratio": result.goodput_ratio}
        save(given.json, {"machine": describe_machine(torch.device("cpu")), "flags": flags, **report})
