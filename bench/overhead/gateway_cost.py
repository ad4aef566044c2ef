"""The cost of OpenAI's API: the gateway's CPU time for each chunk, and what clients see beside clients of gRPC.

    python -m bench gateway-cost                     # 64 clients on the embedded model, five rounds of turns

Both kinds of client send the same requests to one server in turns: streams of `Generate` to the scheduler, and streamed
completions to the gateway. A chunk is an event with text, most often of one token. There is no prefix cache, which
would favour the second turn of a round. Each round ends with requests of one length that begin together: while all of
them are open, the gateway does nothing but pass on chunks. Ratios and differences are medians of the rounds. All other
flags are those of `quire serve`.
"""

import asyncio
import statistics
import time
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
from bench.trace import TraceRequest, TraceSettings, make_trace
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
    """A pair of turns, and the open streams after it.

    tokens_per_chunk   of the turn over HTTP
    us_per_chunk       CPU time of the gateway's process in that turn for each chunk, with that of its requests
    open_us_per_chunk  the same, while all streams are open and none begins or ends
    """

    grpc: Turn
    http: Turn
    tokens_per_chunk: float
    us_per_chunk: float
    open_us_per_chunk: float

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
            opened = TraceSettings(num_clients, info.vocab_size, info.max_model_len, seed=seed, lengths="open")
            open_us = await _open_us_per_chunk(over_http, make_trace(opened), gateway)
            rounds.append(
                Round(_turn(plain), _turn(result), num_tokens / num_chunks, 1e6 * cpu_s / num_chunks, open_us)
            )
        return rounds


async def _open_us_per_chunk(send: Send, trace: Sequence[TraceRequest], gateway: psutil.Process) -> float:
    """Sends all requests at once. Returns the CPU time of a chunk while no stream begins or ends.

    Raises BenchError if the streams are not open together.
    """
    samples: list[tuple[float, float]] = []  # time, CPU time

    async def look() -> None:
        while True:
            samples.append((time.perf_counter(), _cpu_s(gateway)))
            await asyncio.sleep(0.02)

    looking = asyncio.create_task(look())
    try:
        records = (await closed_loop(send, trace, len(trace))).records
    finally:
        looking.cancel()
    first_s = max(record.arrivals_s[0] for record in records)
    last_s = min(record.arrivals_s[-1] for record in records)
    inside = [sample for sample in samples if first_s <= sample[0] <= last_s]
    if len(inside) < 2:
        raise BenchError("the streams are too short to be open together")
    (start_s, cpu_start_s), (stop_s, cpu_stop_s) = inside[0], inside[-1]
    num_chunks = sum(start_s < at_s <= stop_s for record in records for at_s in record.arrivals_s)
    if not num_chunks:
        raise BenchError("no chunk arrived while all streams were open")
    return 1e6 * (cpu_stop_s - cpu_start_s) / num_chunks


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
            f" {each.us_per_chunk:.1f} us a chunk of {each.tokens_per_chunk:.2f} tokens,"
            f" {each.open_us_per_chunk:.1f} us while all are open"
        )
    result: dict[str, Any] = {
        "ratio": statistics.median(each.ratio for each in rounds),
        "ttft_difference_ms": statistics.median(each.http.ttft_ms - each.grpc.ttft_ms for each in rounds),
        "us_per_chunk": statistics.median(each.us_per_chunk for each in rounds),
        "open_us_per_chunk": statistics.median(each.open_us_per_chunk for each in rounds),
    }
    print(
        f"{given.clients} clients over HTTP: {result['ratio']:.1%} of the rate over gRPC, the first token"
        f" {result['ttft_difference_ms']:+.1f} ms later, {result['us_per_chunk']:.1f} us of the gateway's CPU a chunk,"
        f" {result['open_us_per_chunk']:.1f} us while all streams are open (medians)"
    )
    if given.json is not None:
        machine = describe_machine(None)
        save(given.json, {"machine": machine, **result, "rounds": [asdict(each) for each in rounds]})
