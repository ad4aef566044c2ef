"""Blocks saved by sharing, for samples, beams and a system prompt: prints a table, saves JSON and a plot.

python -m bench sharing --numbers 2,4,6
"""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from bench.command_line import SERVICE_FLAGS, Parser, at_least, open_console, parse_concurrencies
from bench.report import save
from bench.server_process import quire_server
from bench.sharing.cases import all_cases
from bench.sharing.measure import SharingSettings, measure
from bench.sharing.report import PlotUnavailable, render_table, report, save_plot

OUTPUT = Path("bench/results/sharing.json")


async def run(
    settings: SharingSettings, address: str | None, service_flags: Sequence[str], output: Path, console: Console
) -> None:
    """Measures the server at `address`, or one that is started with `service_flags`; writes `output` and a plot.

    Raises BenchError, QuireError and OSError.
    """
    async with AsyncExitStack() as resources:
        if address is None:
            with console.status("starting the services"):
                server = await resources.enter_async_context(quire_server(service_flags))
            address = server.addresses["grpc"]
        info, results = await measure(address, settings, console)
    console.print(render_table(results))
    save(output, report(results, asdict(info)))
    console.print(f"saved to {output}")
    try:
        console.print(f"drawn to {save_plot(results, output)}")
    except PlotUnavailable as error:
        console.print(str(error), markup=False)


def main(arguments: Sequence[str]) -> None:
    flags = Parser("sharing", f"{__doc__}\n{SERVICE_FLAGS}")
    flags.add_argument("--url", help="gRPC address of a server (default: one is started)")
    flags.add_argument("--numbers", "-n", default="2,4,6", help="numbers of samples, beams and requests")
    flags.add_argument("--num-requests", type=at_least(1), default=8, help="requests of each case")
    flags.add_argument("--num-system-tokens", type=at_least(1), default=341, help="length of the system prompt")
    flags.add_argument("--seed", type=int, default=7, help="seed of lengths and texts")
    flags.add_argument(
        "--output", type=Path, default=OUTPUT, help="file of results; the plot is saved in the same folder"
    )
    given, others = flags.parse_known_args(arguments)
    if others and given.url:
        flags.error(f"unknown flags: {' '.join(others)}")
    settings = SharingSettings(
        cases=tuple(all_cases(parse_concurrencies(given.numbers))),
        num_requests=given.num_requests,
        seed=given.seed,
        num_system_tokens=given.num_system_tokens,
    )
    asyncio.run(run(settings, given.url, others, given.output, open_console()))
