"""Each attack on services of its own, beside a victim: share of its requests served, its TTFT, the scheduler's memory.

    python -m bench attacks                                    # all attacks, on the embedded model
    python -m bench attacks --only rapid-reset,huge-texts --json bench/results/attacks.json

The victim runs alone first, in the same services, then beside the attack. Attackers have the lowest priority, so that
the server is measured and not the cores. Processes of that priority still cost a victim time where they share its
cores, so as many of them as there are cores compute beside the victim that is alone. The bound of a time to the first
token beside an attack is twice that of the victim alone and a step, each the 99th percentile: of the steps that a
request meets, so that each step counts by its time. The first seconds of an attack are reported on their own
(onset), and together with what follows (whole). All other flags are those of `quire serve`.
"""

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.attacks.attacks import ATTACKS
from bench.attacks.tenant_keys import make_key
from bench.attacks.victim import Experience, experience, live
from bench.command_line import BenchError, Parser, open_console
from bench.machine import describe_machine
from bench.report import save
from bench.server_process import child_process, quire_server
from bench.step_traces import StepRecorder
from quire.async_client import AsyncClient
from quire.command import API_KEY

_MIB = 1 << 20
_RSS_INTERVAL_S = 0.1
_WARM_UP_S = 1.0
_CONTROL = "busy-cores"
_ONSET_S = 5.0


@dataclass(frozen=True, slots=True)
class Row:
    """One attack: the victim alone, beside it and after it, and the largest memory of the scheduler in MiB.

    alone        beside processes that compute at the attacker's priority, and send nothing
    onset        during the first seconds of the attack
    whole        during these and after them
    step_p99_ms  the time that the device spent on a step beside the attack, each step weighted by its time, because a
                 request arrives in a long step more often than in a short one; None without a step
    error        the reason why there is nothing to report beside the attack, such as services that have died
    """

    attack: str
    alone: Experience
    onset: Experience | None
    beside: Experience | None
    whole: Experience | None
    after: Experience | None
    scheduler_rss_mib: float
    step_p99_ms: float | None = None
    error: str = ""

    @property
    def bound_ms(self) -> float | None:
        """The bound of the 99th percentile of the time to the first token beside the attack."""
        if self.alone.ttft_p99_ms is None or self.step_p99_ms is None:
            return None
        return 2 * self.alone.ttft_p99_ms + self.step_p99_ms


async def measure(
    attacks: Sequence[str], flags: Sequence[str], duration_s: float, num_requests: int, keep: Callable[[Row], None]
) -> None:
    """Runs the attacks one after the other. `keep` takes each row. Victim and attacker are different tenants.

    Alone and beside an attack, the victim sends requests for `duration_s`, and on until it has sent `num_requests`, but
    for ten times `duration_s` at most.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "keys.json"
        key = make_key("victim", path, "generate", "observe")
        os.environ[API_KEY] = make_key("attacker", path, "generate", "observe")  # `attacker` reads it
        for attack in attacks:
            async with quire_server(["--api-keys", str(path), *flags]) as server:
                async with AsyncClient(server.addresses["grpc"], api_key=key, resume_timeout_s=0) as client:
                    keep(await _beside(attack, server.pid, server.addresses, client, duration_s, num_requests))


async def _beside(
    attack: str, pid: int, addresses: dict[str, str], client: AsyncClient, duration_s: float, num_requests: int
) -> Row:
    longest_s = 10 * (_ONSET_S + duration_s) + 60
    where = ("--grpc", addresses["grpc"], "--http", addresses["http"], "--duration-s", str(longest_s))
    await live(client, _WARM_UP_S)
    async with child_process("bench", "attacker", _CONTROL, *where, ready="ready"):
        alone = experience(await live(client, duration_s, num_requests=num_requests))
    async with _largest_rss(pid) as rss:
        async with child_process("bench", "attacker", attack, *where, ready="ready"):
            async with StepRecorder(client) as recorder:
                requests = await live(client, _ONSET_S + duration_s, num_requests=num_requests, seed=1)
        after = experience(await live(client, _WARM_UP_S, seed=2))
    steps_ms = [step.busy_ns / 1e6 for step in recorder.steps]
    return Row(
        attack,
        alone=alone,
        onset=experience(requests, until_s=_ONSET_S),
        beside=experience(requests, from_s=_ONSET_S),
        whole=experience(requests),
        after=after,
        scheduler_rss_mib=rss() / _MIB,
        step_p99_ms=met_percentile_99(steps_ms),
    )


def met_percentile_99(steps_ms: Sequence[float]) -> float | None:
    """Returns the length that 99 % of the steps do not exceed which requests meet that arrive at random times."""
    left_ms = 0.01 * sum(steps_ms)
    for step_ms in sorted(steps_ms, reverse=True):
        left_ms -= step_ms
        if left_ms <= 0:
            return step_ms
    return None


@contextlib.asynccontextmanager
async def _largest_rss(pid: int) -> AsyncIterator[Callable[[], int]]:
    """Yields a function that returns the largest resident memory, in bytes, of the scheduler of `quire serve`."""
    import psutil

    scheduler = next(
        (child for child in psutil.Process(pid).children(recursive=True) if "scheduler" in " ".join(child.cmdline())),
        None,
    )
    if scheduler is None:
        raise BenchError("no scheduler was found among the processes of quire serve")
    largest = 0

    async def watch() -> None:
        nonlocal largest
        while True:
            with contextlib.suppress(psutil.NoSuchProcess):
                largest = max(largest, scheduler.memory_info().rss)
            await asyncio.sleep(_RSS_INTERVAL_S)

    watching = asyncio.create_task(watch())
    try:
        yield lambda: largest
    finally:
        watching.cancel()


def render(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("attack")
    for heading in (
        "served",
        "of",
        "ratio",
        "TTFT p50 alone",
        "beside",
        "TTFT p99 alone",
        "beside",
        "bound",
        "onset",
        "whole",
        "TTFT max, whole",
        "RSS MiB",
        "after",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        beside, after = row.beside, row.after
        total = 0 if beside is None else beside.num_served + sum(beside.failures.values())
        table.add_row(
            row.attack,
            "-" if beside is None else str(beside.num_served),
            str(total),
            "-" if beside is None else f"{beside.served_ratio:.1%}",
            _ms(row.alone.ttft_p50_ms),
            _ms(beside and beside.ttft_p50_ms),
            _ms(row.alone.ttft_p99_ms),
            _ms(beside and beside.ttft_p99_ms),
            _ms(row.bound_ms),
            _ms(row.onset and row.onset.ttft_p99_ms),
            _ms(row.whole and row.whole.ttft_p99_ms),
            _ms(row.whole and row.whole.ttft_max_ms),
            f"{row.scheduler_rss_mib:.0f}",
            "-" if after is None else f"{after.served_ratio:.0%}",
        )
    return table


def _ms(value: Any) -> str:
    return f"{value:.1f} ms" if isinstance(value, float) else "-"


def main(arguments: Sequence[str]) -> None:
    parser = Parser("attacks", __doc__)
    parser.add_argument("--only", default="", help="names of attacks, separated by commas")
    parser.add_argument("--duration-s", type=float, default=6.0, help="seconds of each measurement, at least")
    parser.add_argument("--num-requests", type=int, default=500, help="requests of each measurement, at least")
    parser.add_argument("--json", type=Path, help="file of results")
    given, flags = parser.parse_known_args(arguments)
    wanted = [name for name in given.only.split(",") if name] or list(ATTACKS)
    if unknown := sorted(set(wanted) - set(ATTACKS)):
        raise BenchError(f"no attacks are called {', '.join(unknown)}; there are: {', '.join(ATTACKS)}")
    rows: list[Row] = []
    machine = describe_machine(None)

    def keep(row: Row) -> None:
        rows.append(row)
        print(f"{row.attack}: served {row.beside.served_ratio:.1%}" if row.beside else row.attack, file=sys.stderr)
        if given.json is not None:
            save(given.json, {"machine": machine, "flags": flags, "rows": [asdict(each) for each in rows]})

    asyncio.run(measure(wanted, flags, given.duration_s, given.num_requests, keep))
    open_console().print(render(rows))
