"""The clients of `bench overload`, which run in a process of their own: a closed loop, and an open one."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from bench.attacks.ordinary_requests import generate
from quire.async_client import AsyncClient
from quire.errors import DeadlineExceededError, QueueFullError, QuireError

OUTPUT_TOKENS = 64
WARM_UP_S = 2.0
_NUM_CONNECTIONS = 16
IN_TIME, LATE, REFUSED, EXPIRED, CUT_OFF = "in time", "late", "refused", "expired before a token", "cut off"


@dataclass(slots=True)
class Tally:
    """Counts what the clients have received between the end of the warm-up, `from_s`, and `end_s` (time.monotonic()).

    num_tokens   tokens of value
    num_lost     tokens of requests that were not complete in time
    outcomes     number of requests by how they ended, those of the warm-up included
    num_sent     requests that were sent, those of the warm-up included
    processor_s  processor time of the clients
    """

    duration_s: float
    from_s: float = field(init=False)
    num_tokens: int = 0
    num_lost: int = 0
    num_sent: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    processor_s: float = 0.0

    def __post_init__(self) -> None:
        self.from_s = time.monotonic() + WARM_UP_S

    @property
    def end_s(self) -> float:
        return self.from_s + self.duration_s

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.duration_s

    def count(self, outcome: str) -> None:
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    @property
    def is_counting(self) -> bool:
        return self.from_s <= time.monotonic() < self.end_s


def send_one_by_one(address: str, duration_s: float, num_clients: int) -> Tally:
    """Runs clients without deadlines, each of which sends a request when the one before has ended."""
    return asyncio.run(_closed(address, duration_s, num_clients))


def send_all(address: str, duration_s: float, rate: float, deadline_s: float) -> Tally:
    """Sends `rate` requests a second, each with a deadline."""
    return asyncio.run(_open(address, duration_s, rate, deadline_s))


@asynccontextmanager
async def _connected(address: str) -> AsyncIterator[list[AsyncClient]]:
    """Yields clients with a connection each: a server permits 256 streams on one, and further ones wait unseen."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(AsyncClient(address)) for _ in range(_NUM_CONNECTIONS)]


async def _closed(address: str, duration_s: float, num_clients: int) -> Tally:
    async with _connected(address) as clients:
        tally = Tally(duration_s)
        watching = asyncio.create_task(_watch(tally))

        async def loop(seed: int) -> None:
            rng = random.Random(seed)
            while time.monotonic() < tally.end_s:
                tally.num_sent += 1
                async for num_tokens in generate(clients[seed % _NUM_CONNECTIONS], rng, OUTPUT_TOKENS):
                    tally.num_tokens += num_tokens * tally.is_counting
                tally.count(IN_TIME)

        async with asyncio.TaskGroup() as group:
            for seed in range(num_clients):
                group.create_task(loop(seed))
        await watching
    return tally


async def _open(address: str, duration_s: float, rate: float, deadline_s: float) -> Tally:
    async with _connected(address) as clients:
        tally = Tally(duration_s)
        watching = asyncio.create_task(_watch(tally))

        async def send(seed: int) -> None:
            sent_s, num_tokens, outcome = time.monotonic(), 0, LATE
            rng = random.Random(f"late {seed}")
            try:
                async for number in generate(
                    clients[seed % _NUM_CONNECTIONS], rng, OUTPUT_TOKENS, timeout_s=deadline_s
                ):
                    num_tokens += number
            except QueueFullError:
                outcome = REFUSED
            except DeadlineExceededError:
                outcome = CUT_OFF if num_tokens else EXPIRED
            except QuireError as error:
                outcome = type(error).__name__
            else:
                if num_tokens == OUTPUT_TOKENS and time.monotonic() - sent_s <= deadline_s:
                    outcome = IN_TIME
            tally.count(outcome)
            if tally.is_counting:
                if outcome == IN_TIME:
                    tally.num_tokens += num_tokens
                else:
                    tally.num_lost += num_tokens

        started_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            while (now_s := time.monotonic()) < tally.end_s:
                while tally.num_sent < rate * (now_s - started_s):
                    group.create_task(send(tally.num_sent))
                    tally.num_sent += 1
                await asyncio.sleep(1 / rate)
        await watching
    return tally


async def _watch(tally: Tally) -> None:
    """Measures the processor time of this process after the warm-up."""
    await asyncio.sleep(WARM_UP_S)
    before_s = time.process_time()
    await asyncio.sleep(tally.duration_s)
    tally.processor_s = time.process_time() - before_s
