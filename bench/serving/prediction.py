"""Compares simulated with measured throughput: a cost model is fitted to some runs and tested on others.

    python -m bench prediction --fitted 1,8,32 --predicted 4,16,64

Measures a server at several numbers of clients, fits a cost model to the steps of some of these runs, and simulates all
of them. The runs that were not used for the fit are the test. All runs are on one machine: the time of a step includes
what scheduler, transport and clients take from the cores that they share with the executor, and so does the prediction.

The simulated server has the limits that the real one reports, and otherwise the defaults of `quire serve`. Flags that
change something else in the scheduler are refused, and a server at --url must have been started without them.
"""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from bench.command_line import SERVICE_FLAGS, BenchError, Parser, at_least, open_console, parse_concurrencies
from bench.load import LoadResult
from bench.machine import local_device
from bench.report import save
from bench.server_process import quire_server
from bench.serving.engines import quire_engine
from bench.serving.measurer import LoadSettings, Run, Turn, measure, trace_settings, warm_up_trace
from bench.trace import LENGTHS, TraceRequest, make_trace
from planning.arrivals import ClosedLoop
from planning.errors import PlanningError
from planning.fit import Fit, fit_cost
from planning.measured_steps import MeasuredStep, measured_load, timed, turnaround_s
from planning.records import Records
from planning.server import Server
from planning.simulation import Horizon, Simulation
from planning.workload import Job, ListedJobs
from quire.async_client import AsyncClient
from quire.block_map import ServerInfo, StepTrace
from scheduler.core import SchedulerLimits
from scheduler.engine.options import TARGET_ON_CPU_MS, TARGET_ON_GPU_MS

_MIN_REQUESTS = 24
_REQUESTS_PER_CLIENT = 6
NOT_SIMULATED = (
    "batching",
    "batch_timeout_s",
    "memory",
    "target_inter_token_latency_ms",
    "max_in_flight",
    "max_waiting_requests",
    "max_waiting_prompt_tokens",
    "enable_prefix_caching",
    "tenants",
    "replicas",
)
"""Settings of `quire serve` that change what the scheduler does, and that the simulation does not have."""


@dataclass(frozen=True, slots=True)
class PredictionSettings:
    """The runs of a prediction.

    fitted        numbers of clients whose steps the cost model is fitted to; the least gives the clients' turnaround
    predicted     numbers of clients that it is tested on
    num_requests  requests of each run; None: six for each client, at least 24
    lengths       lengths of prompts and outputs: a name of `bench.trace.LENGTHS`
    device        device of the executor, as in `quire serve`: the default target of a step depends on it
    """

    fitted: tuple[int, ...] = (1, 8, 32)
    predicted: tuple[int, ...] = (4, 16, 64)
    num_requests: int | None = None
    seed: int = 7
    lengths: str = "mixed"
    device: str = "auto"

    @property
    def target_s(self) -> float:
        """The time that a step with decodes should take at most."""
        is_cpu = self.device == "cpu" or (self.device == "auto" and local_device() is None)
        return (TARGET_ON_CPU_MS if is_cpu else TARGET_ON_GPU_MS) / 1e3

    def load(self, num_clients: int) -> LoadSettings:
        """Returns the load of one run."""
        num_requests = self.num_requests or max(_MIN_REQUESTS, _REQUESTS_PER_CLIENT * num_clients)
        return LoadSettings((num_clients,), num_requests, self.seed, lengths=self.lengths)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One run, measured and simulated: output tokens/s, and medians of the times that clients see.

    error_ratio       (predicted - measured) / measured, in tokens/s
    own_error_ratio   the same with a cost model that is fitted to this run's own steps. It is the error of simulation
                      and fit alone; the rest of error_ratio comes from a machine that changed between the runs
    predicted_ttft_s  simulated time since the arrival in the queue, plus the clients' turnaround
    """

    num_clients: int
    is_fitted: bool
    num_requests: int
    measured_tokens_per_s: float
    predicted_tokens_per_s: float
    error_ratio: float
    own_error_ratio: float
    measured_ttft_s: float
    predicted_ttft_s: float
    measured_tpot_s: float
    predicted_tpot_s: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """The fitted cost model and all comparisons.

    max_error_ratio  largest absolute error of the runs that the model was not fitted to; None if there are none
    """

    model_name: str
    fit: Fit
    turnaround_s: float
    comparisons: tuple[Comparison, ...]
    max_error_ratio: float | None


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """The measured run of one number of clients."""

    trace: list[TraceRequest]
    load: LoadResult
    steps: list[MeasuredStep]


async def measure_and_predict(address: str, settings: PredictionSettings, console: Console) -> Prediction:
    """Measures the server at `address`. Raises LoadError, QuireError, and PlanningError for runs with too few steps."""
    async with AsyncClient(address, resume_timeout_s=0) as client:
        info = await client.server_info()
        turns = [
            Turn(0, number, trace_settings(settings.load(number), info, number))
            for number in sorted({*settings.fitted, *settings.predicted})
        ]
        with console.status("measuring"):
            runs = await measure([quire_engine(client, pool_interval_s=None)], turns, warm_up_trace(turns[0].trace))
    return predict(info, {run.turn.concurrency: _as_measured(run) for run in runs}, settings)


def _as_measured(run: Run) -> MeasuredRun:
    observed = run.observed
    return MeasuredRun(make_trace(run.turn.trace), observed.load, [_measured(step) for step in observed.steps])


def predict(info: ServerInfo, runs: dict[int, MeasuredRun], settings: PredictionSettings) -> Prediction:
    """Fits the cost model to the chosen runs, and simulates all of them."""
    fit = fit_cost(*(timed(runs[number].steps) for number in settings.fitted))
    pause_s = turnaround_s(runs[min(settings.fitted)].steps) or 0.0
    comparisons = tuple(
        _compare(number, run, number in settings.fitted, info, fit, pause_s, settings.target_s)
        for number, run in runs.items()
    )
    errors = [abs(comparison.error_ratio) for comparison in comparisons if not comparison.is_fitted]
    return Prediction(info.model_name, fit, pause_s, comparisons, max(errors, default=None))


def _compare(
    number: int, run: MeasuredRun, is_fitted: bool, info: ServerInfo, fit: Fit, pause_s: float, target_s: float
) -> Comparison:
    clients = ClosedLoop(number, pause_s)
    records = simulate_trace(info, run.trace, fit, clients, target_s)
    own = simulate_trace(info, run.trace, fit_cost(timed(run.steps)), clients, target_s)
    requests = records.requests
    first = [f - a for f, a in zip(requests.first_token_s, requests.arrival_s, strict=True)]
    rest = [
        (end - f) / (n - 1)
        for end, f, n in zip(requests.end_s, requests.first_token_s, requests.num_output_tokens, strict=True)
        if n > 1
    ]
    num_tokens = sum(request.max_tokens for request in run.trace)
    measured, predicted = num_tokens / run.load.wall_s, num_tokens / records.virtual_s
    return Comparison(
        num_clients=number,
        is_fitted=is_fitted,
        num_requests=len(run.trace),
        measured_tokens_per_s=measured,
        predicted_tokens_per_s=predicted,
        error_ratio=predicted / measured - 1,
        own_error_ratio=run.load.wall_s / own.virtual_s - 1,
        measured_ttft_s=median(record.ttft_s for record in run.load.records),
        predicted_ttft_s=median(first) + pause_s,
        measured_tpot_s=_median(tpot for record in run.load.records if (tpot := record.tpot_s) is not None),
        predicted_tpot_s=_median(rest),
    )


def simulate_trace(
    info: ServerInfo, trace: Sequence[TraceRequest], fit: Fit, clients: ClosedLoop, target_s: float
) -> Records:
    """Simulates the trace on a server with the limits of `info` and this target for the time of a step with decodes."""
    server = Server(
        SchedulerLimits(
            info.max_num_seqs,
            info.max_num_batched_tokens,
            info.max_model_len,
            target_inter_token_latency_s=target_s,
        ),
        num_blocks=info.num_blocks + 1,
        block_size=info.block_size,
    )
    jobs = [Job(0.0, 0, len(request.prompt_token_ids), request.max_tokens) for request in trace]
    return Simulation(server, [ListedJobs(jobs, clients)], fit.cost, Horizon(num_requests=len(jobs))).run()


def render_table(prediction: Prediction) -> Table:
    """Returns a table with a row for each run; fits 80 columns."""
    title = f"{prediction.model_name}: output tokens/s; medians in ms, measured/predicted"
    table = Table(title=title, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for heading in ("c", "", "measured", "predicted", "error", "own fit", "TTFT", "TPOT"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in prediction.comparisons:
        table.add_row(
            str(row.num_clients),
            "fitted" if row.is_fitted else "test",
            f"{row.measured_tokens_per_s:,.1f}",
            f"{row.predicted_tokens_per_s:,.1f}",
            f"{row.error_ratio:+.1%}",
            f"{row.own_error_ratio:+.1%}",
            f"{row.measured_ttft_s * 1e3:.1f}/{row.predicted_ttft_s * 1e3:.1f}",
            f"{row.measured_tpot_s * 1e3:.2f}/{row.predicted_tpot_s * 1e3:.2f}",
        )
    return table


def _median(values: Iterable[float]) -> float:
    """Returns the median, or 0 if there are no values."""
    found = list(values)
    return median(found) if found else 0.0


def _measured(step: StepTrace) -> MeasuredStep:
    load = measured_load(
        step.num_sequences, step.num_tokens, step.num_decodes, step.num_decode_pairs, step.num_prefill_pairs
    )
    return MeasuredStep(step.epoch, step.planned_ns / 1e9, step.received_ns / 1e9, load)


async def run(
    settings: PredictionSettings, address: str | None, service_flags: Sequence[str], console: Console
) -> Prediction:
    """Measures the server at `address`, or one that is started with `service_flags`. Raises BenchError, QuireError."""
    async with AsyncExitStack() as resources:
        if address is None:
            with console.status("starting the services"):
                server = await resources.enter_async_context(quire_server(service_flags))
            address = server.addresses["grpc"]
        try:
            return await measure_and_predict(address, settings, console)
        except PlanningError as error:
            raise BenchError(str(error)) from error


def find_not_simulated(flags: Sequence[str]) -> list[str]:
    """Returns those of the flags of `quire serve` that change the scheduler in a way that is not simulated."""
    return [
        name
        for flag in flags
        if (name := flag.split("=")[0]).removeprefix("--").removeprefix("no-").replace("-", "_") in NOT_SIMULATED
    ]


def main(arguments: Sequence[str]) -> None:
    flags = Parser("prediction", f"{__doc__}\n{SERVICE_FLAGS}")
    flags.add_argument("--url", help="gRPC address of a server (default: one is started)")
    flags.add_argument("--fitted", default="1,8,32", help="numbers of clients to fit the cost model to")
    flags.add_argument("--predicted", default="4,16,64", help="numbers of clients to test it on")
    flags.add_argument("--num-requests", type=at_least(1), help="requests of each run (default: 6 for each client)")
    flags.add_argument("--seed", type=int, default=7, help="seed of the traces")
    flags.add_argument("--lengths", choices=sorted(LENGTHS), default="mixed", help="lengths of prompts and outputs")
    flags.add_argument("--device", default="auto", help="device of the executor, also of that at --url")
    flags.add_argument("--output", type=Path, default=Path("bench/results/prediction.json"), help="file of results")
    given, others = flags.parse_known_args(arguments)
    if others and given.url:
        flags.error(f"unknown flags: {' '.join(others)}")
    if not_simulated := find_not_simulated(others):
        flags.error(f"not simulated: {', '.join(not_simulated)}")
    settings = PredictionSettings(
        parse_concurrencies(given.fitted), parse_concurrencies(given.predicted), given.num_requests, given.seed,
        given.lengths, given.device,
    )  # fmt: skip
    console = open_console()
    prediction = asyncio.run(run(settings, given.url, ["--device", given.device, *others], console))
    console.print(render_table(prediction))
    save(given.output, asdict(prediction))
    console.print(f"saved to {given.output}")
