"""The time until the loss of a process is detected, and until the server is ready again.

    python -m bench recovery                       # the embedded model under `quire serve`
    python -m bench recovery --step-timeout-s 2 --json FILE

    SIGKILL and SIGSTOP of the executor, with streams and without requests; SIGKILL of the scheduler

The cases run one after the other, and each starts on an idle server. Detected: from the signal until `grpc.health.v1`
of the scheduler says NOT_SERVING or cannot be reached. Ready: until it says SERVING. A Watch stream reports both,
without polling. Streams that run during the loss are counted, and compared token by token with the same requests
undisturbed. The longest gap is the longest time between two tokens of one stream, as its client sees it. `survival`
measures what streams experience when the scheduler is lost.

Then the tokens that a restart computes again. Streams with prompts of their own run or have ended when the scheduler is
killed; their prompts and received tokens are sent again. Once the executor survives, which retains their KV, and once
it is killed as well.
"""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import grpc.aio
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.command_line import BenchError, Parser
from bench.machine import describe_machine
from bench.report import save
from bench.server_process import ON_FREE_PORTS, child_process
from quire.async_client import AsyncClient
from quire.events import Delta
from quire.model_path import embedded_model

T = TypeVar("T")

NUM_STREAMS = 16
NUM_TOKENS = 400
PROMPT = "Once upon a time"
QUIET_S = 1.0
RECONNECT_AT_ONCE = (
    ("grpc.initial_reconnect_backoff_ms", 20),
    ("grpc.max_reconnect_backoff_ms", 20),
    ("grpc.use_local_subchannel_pool", 1),
)
CASES = (
    ("executor", signal.SIGKILL, True),
    ("executor", signal.SIGKILL, False),
    ("executor", signal.SIGSTOP, True),
    ("executor", signal.SIGSTOP, False),
    ("scheduler", signal.SIGKILL, False),
)


NUM_PROMPT_TOKENS = 300


class RecoveryError(BenchError):
    """A measurement cannot be made, or a stream has wrong tokens."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """One case. All `num_streams` streams ended complete, with the same tokens as undisturbed streams."""

    service: str
    signal: str
    num_streams: int
    detected_s: float
    ready_s: float
    longest_gap_s: float | None


@dataclass(frozen=True, slots=True)
class Recomputation:
    """Tokens that streams had when these services were killed, and how many of them were computed again."""

    lost: tuple[str, ...]
    num_streams: int
    num_known_tokens: int
    num_computed_tokens: int
    most_computed_tokens: int


@dataclass(slots=True)
class Stream:
    """The token ids of one request, and the longest time between two messages."""

    token_ids: list[int]
    longest_gap_s: float = 0.0


class Watch:
    """Follows the health of a server."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.is_serving = False
        self._changed = asyncio.Condition()

    async def follow(self) -> None:
        while True:
            async with grpc.aio.insecure_channel(self._address, options=RECONNECT_AT_ONCE) as channel:
                with suppress(grpc.aio.AioRpcError):
                    stub = health_pb2_grpc.HealthStub(channel)
                    async for response in stub.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True):
                        await self._say(response.status == health_pb2.HealthCheckResponse.SERVING)
            await self._say(False)

    async def until(self, is_serving: bool) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.is_serving is is_serving)

    async def _say(self, is_serving: bool) -> None:
        async with self._changed:
            self.is_serving = is_serving
            self._changed.notify_all()


def service_flags(step_timeout_s: float) -> list[str]:
    """Returns flags of `quire serve` with the embedded model on free ports."""
    return [*ON_FREE_PORTS, "--model", embedded_model(), "--step-timeout-s", str(step_timeout_s)]


def child(serve: psutil.Process, service: str) -> psutil.Process:
    """Returns the running process of a service. Raises RecoveryError if there is none."""
    for process in serve.children():
        words = process.cmdline()
        if (service, "quire") in zip(words[1:], words, strict=False):
            return process
    raise RecoveryError(f"the {service} is not running")


async def stream(client: AsyncClient, seed: int, has_begun: asyncio.Event | None = None) -> Stream:
    received, last_s = Stream([]), None
    async for event in client.generate(PROMPT, seed=seed, max_tokens=NUM_TOKENS, ignore_eos=True):
        if isinstance(event, Delta):
            now_s = time.perf_counter()
            received.longest_gap_s = max(received.longest_gap_s, now_s - last_s if last_s is not None else 0.0)
            received.token_ids += event.token_ids
            last_s = now_s
            if has_begun is not None:
                has_begun.set()
    return received


async def streams(client: AsyncClient, begun: Sequence[asyncio.Event | None]) -> list[Stream]:
    return await asyncio.gather(*[stream(client, seed, event) for seed, event in enumerate(begun)])


async def measure(step_timeout_s: float) -> AsyncIterator[Recovery]:
    """Measures one case after the other. Raises RecoveryError."""
    # Not `quire_server`, which treats a restart as a failure.
    async with child_process("quire", "serve", *service_flags(step_timeout_s)) as server:
        serve, address = psutil.Process(server.pid), server.addresses["grpc"]
        watch = Watch(address)
        following = asyncio.create_task(watch.follow())
        for service, number, has_load in CASES:
            async with AsyncClient(address, wait_for_ready=True) as client:
                expected = await streams(client, [None] * NUM_STREAMS)
                await asyncio.sleep(QUIET_S)
                begun = [asyncio.Event() for _ in range(NUM_STREAMS if has_load else 0)]
                load = asyncio.create_task(streams(client, begun))
                await asyncio.gather(*[event.wait() for event in begun])
                if load.done() and has_load:
                    raise RecoveryError("the streams had ended before")
                child(serve, service).send_signal(number)
                sent_s = time.perf_counter()
                await watch.until(False)
                detected_s = time.perf_counter() - sent_s
                await watch.until(True)
                ready_s = time.perf_counter() - sent_s
                disturbed = await load
            if [each.token_ids for each in disturbed] != [each.token_ids for each in expected[: len(disturbed)]]:
                raise RecoveryError(f"{number.name} of the {service}: a stream has other tokens")
            gap_s = max((each.longest_gap_s for each in disturbed), default=None)
            yield Recovery(service, number.name, len(disturbed), detected_s, ready_s, gap_s)
        following.cancel()


async def measure_recomputation(num_streams: int) -> AsyncIterator[Recomputation]:
    """Measures how many tokens are computed again with and without the KV of the executor."""
    async with child_process("quire", "serve", *service_flags(10.0)) as server:
        serve, address = psutil.Process(server.pid), server.addresses["grpc"]
        watch = Watch(address)
        following = asyncio.create_task(watch.follow())
        for lost in (("scheduler",), ("scheduler", "executor")):
            known = [_own_prompt(number) for number in range(num_streams)]
            async with AsyncClient(address, wait_for_ready=True) as client:
                begun = [asyncio.Event() for _ in known]
                lengths = [NUM_TOKENS // 10, NUM_TOKENS] * num_streams
                arguments = zip(known, begun, lengths, strict=False)
                tasks = [asyncio.create_task(_extend(client, *each)) for each in arguments]
                await asyncio.gather(*[event.wait() for event in begun], *tasks[::2])
                for service in lost:
                    child(serve, service).send_signal(signal.SIGKILL)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await watch.until(False)
                await watch.until(True)
            async with AsyncClient(address, wait_for_ready=True) as client:
                again = await asyncio.gather(*[client.complete(prompt, max_tokens=1) for prompt in known])
            computed = [each.prompt_tokens - each.cached_tokens for each in again]
            yield Recomputation(lost, num_streams, sum(map(len, known)), sum(computed), max(computed))
        following.cancel()


def _own_prompt(number: int) -> list[int]:
    """Returns token ids of which no two prompts share the first block."""
    return [5 + (37 * number + 3 * position) % 1000 for position in range(NUM_PROMPT_TOKENS)]


async def _extend(client: AsyncClient, token_ids: list[int], begun: asyncio.Event, max_tokens: int) -> None:
    """Generates tokens and appends them to the prompt."""
    async for event in client.generate(list(token_ids), seed=1, max_tokens=max_tokens, ignore_eos=True):
        if isinstance(event, Delta):
            token_ids += event.token_ids
            if len(token_ids) > NUM_PROMPT_TOKENS + NUM_TOKENS // 20:
                begun.set()


def recomputation_row(each: Recomputation) -> str:
    lost = f"{' and '.join(each.lost)} SIGKILL"
    return (
        f"{lost:<30} {each.num_streams:>4} streams of {each.num_known_tokens:>6,} tokens: "
        f"{each.num_computed_tokens:>6,} computed again, {each.most_computed_tokens:>4} at most for one stream"
    )


HEAD = f"{'lost':<20} {'streams':>7} {'detected':>9} {'ready':>9} {'longest gap':>11}"


def row(each: Recovery) -> str:
    gap = "-" if each.longest_gap_s is None else f"{each.longest_gap_s:.2f} s"
    return (
        f"{each.service + ' ' + each.signal:<20} {each.num_streams:>7} {each.detected_s:>7.2f} s "
        f"{each.ready_s:>7.2f} s {gap:>11}"
    )


async def printed(cases: AsyncIterator[T], row: Callable[[T], str]) -> list[T]:
    """Prints each case when it has been measured, because a case can take minutes with a long timeout."""
    measured = []
    async for case in cases:
        print(row(case), flush=True)
        measured.append(case)
    return measured


def main(arguments: Sequence[str]) -> None:
    parser = Parser("recovery", __doc__)
    parser.add_argument("--step-timeout-s", type=float, default=10.0, help="step timeout of `quire serve`")
    parser.add_argument("--streams", type=int, default=NUM_STREAMS, help="streams that a restart cuts off")
    parser.add_argument("--only-recomputation", action="store_true", help="measure only what a restart computes again")
    parser.add_argument("--json", type=Path, help="file of results")
    given = parser.parse_args(arguments)
    recoveries: list[Recovery] = []
    if not given.only_recomputation:
        print(HEAD)
        recoveries = asyncio.run(printed(measure(given.step_timeout_s), row))
    recomputations = asyncio.run(printed(measure_recomputation(given.streams), recomputation_row))
    if given.json is not None:
        result = {
            "machine": describe_machine(None),
            "step_timeout_s": given.step_timeout_s,
            "recoveries": [asdict(r) for r in recoveries],
            "recomputations": [asdict(r) for r in recomputations],
        }
        save(given.json, result)
