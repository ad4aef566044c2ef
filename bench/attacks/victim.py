"""An ordinary client, and what it experiences: requests served, and the time to the first token."""

import asyncio
import math
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
    """The requests of a victim. failures: number of requests by error; the times are None without a served one.

    ttft_max_ms  the longest time: a victim sends one request after the other, so that a service which stands still
                 delays only one of them, and no percentile of many requests shows for how long
    """

    num_served: int
    failures: dict[str, int]
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    ttft_max_ms: float | None

    @property
    def served_ratio(self) -> float:
        """Share of the requests that were served; 0 if there was none."""
        total = self.num_served + sum(self.failures.values())
        return self.num_served / total if total else 0.0


@dataclass(frozen=True, slots=True)
class Sent:
    """A request of a victim: the time from the first one to it, and from it to its first token, or its error."""

    sent_s: float
    ttft_s: float | None
    error: str = ""


async def live(client: AsyncClient, duration_s: float, *, num_requests: int = 0, seed: int = 0) -> list[Sent]:
    """Sends one request after the other for a time, and waits for the last one.

    After `duration_s` it goes on until there were `num_requests`, but for ten times `duration_s` at most.
    """
    requests: list[Sent] = []
    rng = random.Random(seed * 1000)
    begin_s = time.monotonic()
    while (sent_s := time.monotonic() - begin_s) < (10 * duration_s if len(requests) < num_requests else duration_s):
        try:
            requests.append(Sent(sent_s, await _ttft_s(client, rng)))
        except (QuireError, TimeoutError) as error:
            requests.append(Sent(sent_s, None, type(error).__name__))
            await asyncio.sleep(_PAUSE_S)
    return requests


def experience(requests: Sequence[Sent], from_s: float = 0.0, until_s: float = math.inf) -> Experience:
    """Returns what a client experiences whose requests these are, of those that were sent in this time."""
    chosen = [request for request in requests if from_s <= request.sent_s < until_s]
    ttfts_ms = [request.ttft_s * 1e3 for request in chosen if request.ttft_s is not None]
    failures = dict(Counter(request.error for request in chosen if request.ttft_s is None))
    median_ms = statistics.median(ttfts_ms) if ttfts_ms else None
    return Experience(len(ttfts_ms), failures, median_ms, percentile_99(ttfts_ms), max(ttfts_ms, default=None))


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


def percentile_99(values: Sequence[float]) -> float | None:
    """Returns the value that 99 % do not exceed, None without values. It never exceeds the largest of a few."""
    if len(values) < 2:
        return values[0] if values else None
    return statistics.quantiles(values, n=100, method="inclusive")[98]
