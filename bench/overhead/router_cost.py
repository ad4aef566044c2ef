"""The cost of the router: what a request through the gateway takes beside one that goes to its scheduler directly.

    python -m bench router-cost                      # 32 clients, five rounds of turns

Two schedulers stand behind one gateway that chooses by cost. Their executors compute nothing, and take a fixed time for
a step. In turns, clients of gRPC send texts to the gateway, and to the schedulers, half of them to each. No two prompts
begin alike. The gateway reads and tokenizes each prompt, finds its blocks among those that the schedulers report, and
passes on each token. Differences are medians of the rounds.
"""

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import psutil

from bench.command_line import Parser, at_least
from bench.machine import describe_machine
from bench.report import save
from bench.server_process import Child, child_process
from quire.async_client import AsyncClient
from quire.events import Delta
from quire.model_path import embedded_model

WORDS = ("the", "a", "little", "big", "red", "fox", "dog", "cat", "house", "tree", "river", "saw", "found", "and")
VOCAB_SIZE = 1664
_MODEL_LEN = 4096


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn. us_per_token is CPU time of the gateway, 0 where it has no part."""

    ttft_ms: float
    tokens_per_s: float
    us_per_token: float


@dataclass(frozen=True, slots=True)
class Round:
    direct: Turn
    routed: Turn


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of one turn.

    num_words   length of each prompt
    num_tokens  length of each output
    """

    num_clients: int
    num_requests: int
    num_words: int
    num_tokens: int


@asynccontextmanager
async def services(step_ms: float) -> AsyncIterator[tuple[list[str], Child]]:
    """Yields the addresses of two schedulers, and the gateway before them. Raises ServerFailed."""
    model = embedded_model()
    async with AsyncExitStack() as running:

        async def start(*words: str) -> Child:
            return await running.enter_async_context(child_process(*words))

        addresses = []
        for _ in range(2):
            null = ("bench.overhead.null_executor", "--vocab-size", str(VOCAB_SIZE), "--step-ms", str(step_ms))
            executor = (await start(*null, "--max-model-len", str(_MODEL_LEN))).line.split()[-1]
            ports = ("--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0", "--executor", executor)
            addresses.append((await start("quire", "scheduler", "--model", model, *ports)).addresses["grpc"])
        schedulers = [word for address in addresses for word in ("--scheduler", address)]
        doors = ("--listen", "127.0.0.1:0", "--grpc-listen", "127.0.0.1:0")
        gateway = await start("quire", "gateway", "--model", model, *schedulers, *doors)
        yield addresses, gateway


async def turn(clients: Sequence[AsyncClient], load: Load, seed: int, process: psutil.Process | None = None) -> Turn:
    """Sends the requests, by turns to each of these servers. `process`: its CPU time counts."""
    rng, numbers, ttft_s, num_tokens = random.Random(seed), count(), list[float](), 0
    prompts = [f"{seed} {i} " + " ".join(rng.choices(WORDS, k=load.num_words)) for i in range(load.num_requests)]

    async def one_client() -> None:
        nonlocal num_tokens
        while (number := next(numbers)) < load.num_requests:
            sent_s, first_s = time.perf_counter(), 0.0
            options: dict[str, Any] = {"max_tokens": load.num_tokens, "ignore_eos": True}
            async with clients[number % len(clients)].generate(prompts[number], **options) as events:
                async for event in events:
                    if isinstance(event, Delta):
                        first_s = first_s or time.perf_counter()
                        num_tokens += len(event.token_ids)
            ttft_s.append(first_s - sent_s)

    before_s, began_s = _cpu_s(process), time.perf_counter()
    await asyncio.gather(*(one_client() for _ in range(load.num_clients)))
    wall_s, cpu_s = time.perf_counter() - began_s, _cpu_s(process) - before_s
    return Turn(1e3 * statistics.median(ttft_s), num_tokens / wall_s, 1e6 * cpu_s / num_tokens)


async def measure(load: Load, step_ms: float, num_rounds: int) -> list[Round]:
    """Measures both ways in turns, after a turn of each that is not counted."""
    async with AsyncExitStack() as open_clients:
        addresses, gateway = await open_clients.enter_async_context(services(step_ms))

        async def connected(address: str) -> AsyncClient:
            return await open_clients.enter_async_context(AsyncClient(address, wait_for_ready=True))

        direct = [await connected(address) for address in addresses]
        routed = [await connected(gateway.addresses["grpc"])]
        process = psutil.Process(gateway.pid)
        rounds = []
        for number in range(num_rounds + 1):
            turns = {}
            for name in ("direct", "routed") if number % 2 else ("routed", "direct"):
                is_routed = name == "routed"
                seed = 2 * number + is_routed
                turns[name] = await turn(routed if is_routed else direct, load, seed, process if is_routed else None)
            if number:
                rounds.append(Round(turns["direct"], turns["routed"]))
        return rounds


def _cpu_s(process: psutil.Process | None) -> float:
    if process is None:
        return 0.0
    times = process.cpu_times()
    return float(times.user + times.system)


def main(arguments: Sequence[str]) -> None:
    parser = Parser("router-cost", __doc__)
    parser.add_argument("--clients", type=at_least(1), default=32)
    parser.add_argument("--requests", type=at_least(1), default=256, help="requests of each turn")
    parser.add_argument("--words", type=at_least(1), default=400, help="words of each prompt")
    parser.add_argument("--tokens", type=at_least(1), default=64, help="tokens of each output")
    parser.add_argument("--step-ms", type=at_least(0.0, float), default=10.0, help="time of a step of the executors")
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--json", type=Path, help="file of results")
    given = parser.parse_args(arguments)
    load = Load(given.clients, given.requests, given.words, given.tokens)
    rounds = asyncio.run(measure(load, given.step_ms, given.rounds))
    for number, each in enumerate(rounds, 1):
        print(
            f"round {number}: first token after {each.direct.ttft_ms:.1f} ms directly, {each.routed.ttft_ms:.1f} ms"
            f" through the router; {each.direct.tokens_per_s:,.0f} and {each.routed.tokens_per_s:,.0f} tokens/s;"
            f" {each.routed.us_per_token:.1f} us of the router's CPU a token"
        )
    result = {
        "ttft_difference_ms": statistics.median(each.routed.ttft_ms - each.direct.ttft_ms for each in rounds),
        "us_per_token": statistics.median(each.routed.us_per_token for each in rounds),
        "ratio": statistics.median(each.routed.tokens_per_s / each.direct.tokens_per_s for each in rounds),
    }
    print(
        f"the first token {result['ttft_difference_ms']:+.1f} ms later, {result['us_per_token']:.1f} us of CPU a token,"
        f" {result['ratio']:.1%} of the rate (medians)"
    )
    if given.json is not None:
        machine = describe_machine(None)
        settings = asdict(load) | {"step_ms": given.step_ms}
        save(given.json, {"machine": machine, **settings, **result, "rounds": [asdict(each) for each in rounds]})
