"""Requests as data, and their outcomes, to compare a disturbed run with an undisturbed one."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire import AsyncClient, Delta, Event, Finished, FinishReason, Started
from quire.events import Prompt

OPENINGS = (
    "Once upon a time",
    "One day, a little fox",
    "In a small village by the sea there lived",
    "The old baker opened the door and",
    "It was a cold morning.",
    "There was a brave mouse named",
    "A long time ago, in a forest,",
    "She lived in a wooden cabin by the lake. One windy day",
)


@dataclass(frozen=True, slots=True)
class Job:
    """A request: its prompt, and the options for `AsyncClient.generate`."""

    prompt: Prompt
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def num_sequences(self) -> int:
        return int(self.options.get("n", 1))


@dataclass(slots=True)
class Output:
    """The output of one sequence so far. `reason` is None until the sequence has ended."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    num_completion_tokens: int = 0


@dataclass(slots=True)
class Outcome:
    """Everything that a client has received for one request."""

    outputs: list[Output]
    has_started: bool = False

    @property
    def has_ended(self) -> bool:
        return all(output.reason is not None for output in self.outputs)

    @property
    def num_tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs)

    def add(self, event: Event) -> None:
        """Adds an event. Raises AssertionError if it violates the order of events."""
        match event:
            case Started():
                assert not self.has_started, "started twice"
                self.has_started = True
            case Delta(index=index):
                assert self.has_started, "a delta before the start"
                assert self.outputs[index].reason is None, "a delta after the end"
                self.outputs[index].text += event.text
                self.outputs[index].token_ids += event.token_ids
            case Finished(index=index):
                assert self.outputs[index].reason is None, "finished twice"
                self.outputs[index].reason = event.reason
                self.outputs[index].num_completion_tokens = event.usage.completion_tokens


class StreamGroup:
    """Streams that run concurrently, one for each job; each is read as fast as it comes."""

    def __init__(self, client: AsyncClient, jobs: Sequence[Job]) -> None:
        self._client = client
        self._jobs = jobs
        self.outcomes = [Outcome([Output() for _ in range(job.num_sequences)]) for job in jobs]
        self._news = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> "StreamGroup":
        """Starts all streams."""
        self._tasks = [
            asyncio.create_task(self._stream(job, outcome))
            for job, outcome in zip(self._jobs, self.outcomes, strict=True)
        ]
        return self

    async def until(self, condition: Callable[["StreamGroup"], bool]) -> None:
        """Waits until the condition holds; checks it after every event. Raises the error of a stream that failed."""
        while not condition(self):
            failed = [task for task in self._tasks if task.done() and task.exception() is not None]
            if failed:
                failed[0].result()
            assert not all(task.done() for task in self._tasks), "all streams ended before the condition held"
            self._news.clear()
            await self._news.wait()

    async def ended(self) -> list[Outcome]:
        """Waits for all streams and returns their outcomes. Raises the first error."""
        await asyncio.gather(*self._tasks)
        return self.outcomes

    async def failures(self) -> list[BaseException | None]:
        """Waits for all streams and returns their errors."""
        return await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def num_running(self) -> int:
        return sum(not outcome.has_ended for outcome in self.outcomes)

    @property
    def most_run(self) -> bool:
        """True if at least half of the streams have not ended, so that a disturbance affects them."""
        return 2 * self.num_running >= len(self.outcomes)

    @property
    def num_tokens(self) -> int:
        return sum(outcome.num_tokens for outcome in self.outcomes)

    def all_have(self, num_tokens: int) -> bool:
        """Returns true if every sequence has this many tokens or has ended."""
        return all(
            len(output.token_ids) >= num_tokens or output.reason is not None
            for outcome in self.outcomes
            for output in outcome.outputs
        )

    async def _stream(self, job: Job, outcome: Outcome) -> None:
        try:
            async for event in self._client.generate(job.prompt, **job.options):
                outcome.add(event)
                self._news.set()
        finally:
            self._news.set()


async def outcomes(client: AsyncClient, jobs: Sequence[Job]) -> list[Outcome]:
    """Runs all jobs concurrently and returns their outcomes."""
    return await StreamGroup(client, jobs).start().ended()


class Undisturbed:
    """The outcomes of jobs without a disturbance. Each job runs once, for all tests that share this object."""

    def __init__(self) -> None:
        self._outcomes: dict[str, Outcome] = {}

    async def outcomes(self, client: AsyncClient, jobs: Sequence[Job]) -> list[Outcome]:
        """Returns the outcomes of the jobs; runs those concurrently that have not run yet."""
        missing = [job for job in jobs if repr(job) not in self._outcomes]
        for job, outcome in zip(missing, await outcomes(client, missing), strict=True):
            self._outcomes[repr(job)] = outcome
        return [self._outcomes[repr(job)] for job in jobs]


def differences(actual: Sequence[Outcome], expected: Sequence[Outcome]) -> list[str]:
    """Returns a line for each sequence that differs from the expected one, with the first token that differs."""
    lines = []
    for number, (is_, should_be) in enumerate(zip(actual, expected, strict=True)):
        for index, (output, other) in enumerate(zip(is_.outputs, should_be.outputs, strict=True)):
            if output != other:
                pairs = zip(output.token_ids, other.token_ids, strict=False)
                equal = next((i for i, (a, b) in enumerate(pairs) if a != b), "none of them")
                lines.append(
                    f"request {number}, sequence {index}: {len(output.token_ids)} tokens, {output.reason}; expected "
                    f"{len(other.token_ids)}, {other.reason}; first different token: {equal}"
                )
    return lines


def mixed_jobs(num_jobs: int, num_tokens: int = 140) -> list[Job]:
    """Returns varied jobs: greedy or seeded, with short and long prompts, one or two samples, and stop strings.

    Six of eight have at least `num_tokens`. The other two, which may end earlier by themselves, have at least 100, or
    `num_tokens - 40` if that is less.
    """
    return [_mixed_job(number, num_tokens) for number in range(num_jobs)]


def _mixed_job(number: int, num_tokens: int) -> Job:
    prompt = OPENINGS[number % len(OPENINGS)]
    if number % 5 == 0:  # several blocks long, with a prefix that other prompts share
        prompt = " ".join(OPENINGS[: 2 + number % 7]) + f" Number {number}. {prompt}"
    options: dict[str, Any] = {"max_tokens": num_tokens + number % 33, "ignore_eos": True}
    if number % 2:
        options |= {"temperature": 0.7 + number % 4 / 10, "seed": 1000 + number}
        options |= ({"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, {})[number // 2 % 4]
    else:
        options |= {"temperature": 0}
    if number % 8 == 3:
        options["n"] = 2
    if number % 8 == 6:
        options |= {
            "stop": ["The end", "she said", "."],
            "min_tokens": min(110, num_tokens - 30),
            "include_stop": number % 16 == 6,
        }
    if number % 8 == 1:
        options |= {
            "ignore_eos": False,
            "min_tokens": min(100, num_tokens - 40),
            "max_tokens": min(200, num_tokens + 60),
        }
    return Job(prompt, options)
