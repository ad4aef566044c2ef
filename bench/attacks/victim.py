"""An ordinary client, and what it experiences: requests served, and the time to the first token."""

import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bench.attacks.ordinary_requests import generate
from quire.async_client import AsyncClient
from quire.errors import QuireError

_OUTPUT_TOKENS = 16
_TIMEOUT_S = 20.0
_PAUSE_S = 0.01


@dataclass(frozen=True, slots=True)
class Experience:
    """The requests of a victim. failures: number of requests by error; p50 and p99 are None without a served one."""

    num_served: int
    failures: dict[str, int]
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None

    @property
    def served_ratio(self) -> float:
        """Share of the requests that were served; 0 if there was none."""
        total = self.num_served + sum(self.failures.values())
        return self.num_served / total if total else 0.0


async def live(
    client: AsyncClient, duration_s: float, num_clients: int = 1, *, num_requests: int = 0, seed: int = 0
) -> Experience:
    """Sends one request after the other from each of `num_clients` clients for a time, and waits for the last ones.

    After `duration_s` they go on until there were `num_requests`, but for ten times `duration_s` at most.
    """
    ttfts_s: list[float] = []
    failures: Counter[str] = Counter()
    begin_s = time.monotonic()

    def goes_on() -> bool:
        passed_s = time.monotonic() - begin_s
        is_short = len(ttfts_s) + failures.total() < num_requests
        return passed_s < (10 * duration_s if is_short else duration_s)

    async def loop(rng: random.Random) -> None:
        while goes_on():
            try:
                ttfts_s.append(await _ttft_s(client, rng))
            except (QuireError, TimeoutError) as error:
                failures[type(error).__name__] += 1
                await asyncio.sleep(_PAUSE_S)

    async with asyncio.TaskGroup() as group:
        for i in range(num_clients):
            group.create_task(loop(random.Random(seed * 1000 + i)))
    return _experience(ttfts_s, failures)


async def _ttft_s(client: AsyncClient, rng: random.Random) -> float:
    """Sends a request and reads all its output. Raises TimeoutError if that takes too long."""
    sent_s = time.perf_counter()
    first_s: float | None = None
    async with asyncio.timeout(_TIMEOUT_S):
        async for _ in generate(client, rng, _OUTPUT_TOKENS):
            first_s = first_s or time.perf_counter()
    if first_s is None:
        raise TimeoutError("the stream ended without a token")
    return first_s - sent_s


def _experience(ttfts_s: Sequence[float], failures: Counter[str]) -> Experience:
    if not ttfts_s:
        return Experience(0, dict(failures), None, None)
    return Experience(
        len(ttfts_s), dict(failures), statistics.median(ttfts_s) * 1e3, percentile_99([each * 1e3 for each in ttfts_s])
    )


def percentile_99(values: Sequence[float]) -> float | None:
    """Returns the value that 99 % do not exceed, None without values. It never exceeds the largest of a few."""
    if len(values) < 2:
        return values[0] if values else None
    return statistics.quantiles(values, n=100, method="inclusive")[98]
