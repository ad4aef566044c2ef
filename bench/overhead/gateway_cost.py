"""The cost of OpenAI's API: the gateway's CPU time for each chunk, and what clients see beside clients of gRPC.

    python -m bench gateway-cost                     # 64 clients on the embedded model, five rounds of turns

Both kinds of client send the same requests to one server in turns: streams of `Generate` to the scheduler, and streamed
completions to the gateway. A chunk is an event with text, most often of one token. There is no prefix cache, which
would favour the second turn of a round. Ratios and differences are medians of the rounds. All other flags are those of
`quire serve`.
"""

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.command_line import BenchError, Parser
from bench.load import LoadResult, Send, closed_loop, quire_sender
from bench.machine import describe_machine
from bench.report import save
from bench.server_process import quire_server
from bench.serving.openai_server import openai_sender, openai_session
from bench.trace import TraceSettings, make_trace
from quire.async_client import AsyncClient

FLAGS = ("--no-enable-prefix-caching", "--gateway", "--gateway-listen", "127.0.0.1:0")


@dataclass(frozen=True, slots=True)
class Turn:
    """The rates of one turn, as the clients measure them.

    tokens_per_s  output tokens a second of all clients
    ttft_ms       median time to the first token
    """

    tokens_per_s: float
    ttft_ms: float


@dataclass(frozen=True, slots=True)
class Round:
    """A pair of turns. tokens_per_chunk, us_per_chunk: of the turn over HTTP; CPU time of the gateway's process."""

    grpc: Turn
    http: Turn
    tokens_per_chunk: float
    us_per_chunk: float

    @property
    def ratio(self) -> float:
        return self.http.tokens_per_s / self.grpc.tokens_per_s


async def measure(flags: Sequence[str], num_clients: int, num_requests: int, num_rounds: int) -> list[Round]:
    """Measures both kinds in turns, after a turn of each that is not counted. Raises LoadError and ServerFailed."""
    async with (
        quire_server([*FLAGS, *flags]) as server,
        AsyncClient(server.addresses["grpc"], resume_timeout_s=0) as client,
        openai_session() as session,
    ):
        info = await client.server_info()
        over_grpc = quire_sender(client)
        over_http = openai_sender(session, f"http://{server.addresses['openai']}", info.model_name)
        gateway = _gateway_of(server.pid)

        async def run(send: Send, seed: int) -> LoadResult:
            settings = TraceSettings(num_requests, info.vocab_size, info.max_model_len, seed=seed)
            return await closed_loop(send, make_trace(settings), num_clients)

        async def run_http(seed: int) -> tuple[LoadResult, float]:
            before_s = _cpu_s(gateway)
            return await run(over_http, seed), _cpu_s(gateway) - before_s

        await run(over_grpc, 0)
        await run_http(0)
        rounds = []
        for seed in range(1, num_rounds + 1):
            if seed % 2:
                plain = await run(over_grpc, seed)
                result, cpu_s = await run_http(seed)
            else:
                result, cpu_s = await run_http(seed)
                plain = await run(over_grpc, seed)
            num_chunks = sum(len(record.arrivals_s) for record in result.records)
            num_tokens = sum(record.num_output_tokens for record in result.records)
            rounds.append(Round(_turn(plain), _turn(result), num_tokens / num_chunks, 1e6 * cpu_s / num_chunks))
        return rounds


def _turn(result: LoadResult) -> Turn:
    num_tokens = sum(record.num_output_tokens for record in result.records)
    ttft_s = statistics.median(record.ttft_s for record in result.records)
    return Turn(num_tokens / result.wall_s, 1e3 * ttft_s)


def _gateway_of(supervisor: int) -> psutil.Process:
    """Returns the process that `quire serve` has started as the gateway."""
    for child in psutil.Process(supervisor).children():
        if "gateway" in child.cmdline():
            return child
    raise BenchError("the server has no gateway")


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def main(arguments: Sequence[str]) -> None:
    parser = Parser("gateway-cost", __doc__)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=256, help="requests of each turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file of results")
    given, flags = parser.parse_known_args(arguments)
    rounds = asyncio.run(measure(flags, given.clients, given.requests, given.rounds))
    for number, each in enumerate(rounds, 1):
        print(
            f"round {number}: {each.grpc.tokens_per_s:,.0f} tokens/s over gRPC, {each.http.tokens_per_s:,.0f} over HTTP"
            f" ({each.ratio:.1%}); TTFT {each.grpc.ttft_ms:.1f} and {each.http.ttft_ms:.1f} ms;"
            f" {each.us_per_chunk:.1f} us a chunk of {each.tokens_per_chunk:.2f} tokens"
        )
    result: dict[str, Any] = {
        "ratio": statistics.median(each.ratio for each in rounds),
        "ttft_difference_ms": statistics.median(each.http.ttft_ms - each.grpc.ttft_ms for each in rounds),
        "us_per_chunk": statistics.median(each.us_per_chunk for each in rounds),
    }
    print(
        f"{given.clients} clients over HTTP: {result['ratio']:.1%} of the rate over gRPC, the first token"
        f" {result['ttft_difference_ms']:+.1f} ms later, {result['us_per_chunk']:.1f} us of the gateway's CPU a chunk"
        " (medians)"
    )
    if given.json is not None:
        import torch

        machine = describe_machine(torch.device("cpu"))
        save(given.json, {"machine": machine, **result, "rounds": [asdict(each) for each in rounds]})
