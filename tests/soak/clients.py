"""Clients that send jobs again and again, read fast, slowly, or not to the end, and check every token."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from random import Random

from quire import AsyncClient, DeadlineExceededError, InvalidRequestError, QueueFullError, QuireError
from tests.support.e2e.streams import Job, Outcome, Output, differences

_WAYS = ("fast", "fast", "fast", "slowly", "cancelled", "past its deadline", "invalid")
_SLOW_S = 0.1


class Clients:
    """Sends random jobs, and compares what it receives with `expected`, the outcomes of an undisturbed run.

    failures          a line for each request that failed or differed
    longest_silence_s the longest time between two events of a stream that was read fast
    """

    def __init__(self, jobs: Sequence[Job], expected: Sequence[Outcome], seed: int) -> None:
        self._jobs = jobs
        self._expected = expected
        self._seed = seed
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.num_tokens = 0
        self.longest_silence_s = 0.0

    async def run(self, address: str, num_clients: int, ended: asyncio.Event, timeout_s: float) -> None:
        """Runs that many clients, each with one request at a time, until `ended` is set and their requests end.

        A client waits for a server that is absent until its request's deadline, `timeout_s`. When `ended` is set, slow
        readers read fast, because their streams would otherwise take up to a minute.
        """

        async def one(number: int) -> None:
            random = Random(f"client {self._seed} {number}")
            async with AsyncClient(
                address, timeout_s=timeout_s, resume_timeout_s=timeout_s, wait_for_ready=True
            ) as client:
                while not ended.is_set():
                    await self._request(client, random, ended)

        await asyncio.gather(*map(one, range(num_clients)))

    async def _request(self, client: AsyncClient, random: Random, ended: asyncio.Event) -> None:
        number, way = random.randrange(len(self._jobs)), random.choice(_WAYS)
        self.counts[way] += 1
        job, expected = self._jobs[number], self._expected[number]
        received = Outcome([Output() for _ in range(job.num_sequences)])
        problem = ""
        try:
            await self._read(client, job, way, random, received, ended)
        except InvalidRequestError as error:
            problem = "" if way == "invalid" else f"{error}"
        except (DeadlineExceededError, QueueFullError) as error:  # QueueFullError: it would miss its deadline
            problem = "" if way == "past its deadline" else f"{type(error).__name__}: {error}"
        except QuireError as error:
            problem = f"{type(error).__name__}: {error}"
        else:
            problem = "is not refused" if way == "invalid" else ""
        self.num_tokens += received.num_tokens
        if not problem:
            is_whole = way in ("fast", "slowly")
            problem = "; ".join(differences([received], [expected]) if is_whole else _strays(received, expected))
        if problem:
            self.failures.append(f"job {number}, {way}: {problem}")

    async def _read(
        self, client: AsyncClient, job: Job, way: str, random: Random, received: Outcome, ended: asyncio.Event
    ) -> None:
        options = job.options | ({"top_p": 7.0} if way == "invalid" else {})
        if way == "past its deadline":
            options["timeout_s"] = random.uniform(0.01, 2.0)
        most_tokens = random.randrange(100) if way == "cancelled" else None
        last_s = time.monotonic()
        async with client.generate(job.prompt, **options) as events:
            async for event in events:
                received.add(event)
                if way == "fast":
                    now_s = time.monotonic()
                    self.longest_silence_s, last_s = max(self.longest_silence_s, now_s - last_s), now_s
                elif way == "slowly" and not ended.is_set():
                    await asyncio.sleep(random.uniform(0, _SLOW_S))
                elif most_tokens is not None and received.num_tokens >= most_tokens:
                    return


def _strays(received: Outcome, expected: Outcome) -> list[str]:
    """Returns a line for each sequence whose tokens are not the first tokens of the expected ones."""
    pairs = zip(received.outputs, expected.outputs, strict=True)
    return [
        f"sequence {index}: the {len(output.token_ids)} tokens are not the first of the expected ones"
        for index, (output, whole) in enumerate(pairs)
        if output.token_ids != whole.token_ids[: len(output.token_ids)]
    ]
