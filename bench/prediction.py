"""Is the simulator right? Measures a server at several numbers of clients, fits a cost model to the steps of some of
these runs, simulates all of them, and puts predicted beside measured throughput.

The runs that were not fitted to are the test. Everything is on one machine in one sitting: a step's time holds what
scheduler, transport and clients take from the cores they share with the executor, and so does the prediction.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from rich.console import Console
from rich.table import Table

from bench.load import LoadResult, closed_loop, quire_sender
from bench.serve import BenchSettings, trace_settings, warmup_trace
from bench.step_traces import StepRecorder
from bench.trace import TraceRequest, make_trace
from planning.arrivals import ClosedLoop
from planning.fit import Fit, fit_cost
from planning.measured_steps import MeasuredStep, measured_load, timed, turnaround_s
from planning.records import Records
from planning.server import Server
from planning.simulation import Horizon, Simulation
from planning.workload import Job, ListedJobs
from quire.async_client import AsyncClient
from quire.block_map import ServerInfo, StepTrace
from scheduler.core import SchedulerLimits

_MIN_REQUESTS = 24
_REQUESTS_PER_CLIENT = 6


@dataclass(frozen=True, slots=True)
class PredictionSettings:
    """What to measure.

    address       of a running Quire server (gRPC)
    fitted        numbers of clients whose steps the cost model is fitted to; the least gives the clients' turnaround
    predicted     numbers of clients that it is tried on
    num_requests  of each run; None: six for each client, at least 24
    lengths       of prompts and outputs: a name of `bench.trace.LENGTHS`
    """

    address: str
    fitted: tuple[int, ...] = (1, 8, 32)
    predicted: tuple[int, ...] = (4, 16, 64)
    num_requests: int | None = None
    seed: int = 7
    lengths: str = "mixed"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One run, measured and simulated: output tokens a second, and medians of the times that clients see.

    error_ratio       (predicted - measured) / measured, of tokens a second
    own_error_ratio   the same, where the cost model is fitted to this run's own steps: what is wrong then is the
                      simulation and the line; what is wrong beyond that is that the machine was not the same
    predicted_ttft_s  the simulated time from the arrival in the queue, and the clients' turnaround for the way there
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
    """max_error_ratio  the largest error, in either direction, of the runs that the model was not fitted to"""

    model_name: str
    fit: Fit
    turnaround_s: float
    comparisons: tuple[Comparison, ...]
    max_error_ratio: float


@dataclass(frozen=True, slots=True)
class Run:
    """One number of clients, measured."""

    trace: list[TraceRequest]
    load: LoadResult
    steps: list[MeasuredStep]


async def measure_and_predict(settings: PredictionSettings, console: Console) -> Prediction:
    """Raises LoadError, QuireError, and PlanningError where the runs have too few steps to fit to."""
    async with AsyncClient(settings.address) as client:
        info = await client.server_info()
        runs = await _measure(client, info, settings, console)
    return predict(info, runs, settings)


async def _measure(
    client: AsyncClient, info: ServerInfo, settings: PredictionSettings, console: Console
) -> dict[int, Run]:
    send = quire_sender(client)
    runs = {}
    numbers = sorted({*settings.fitted, *settings.predicted})
    drawn = BenchSettings(settings.address, tuple(numbers), seed=settings.seed, lengths=settings.lengths)
    await closed_loop(send, warmup_trace(drawn, info), 1)
    for number in numbers:
        num_requests = settings.num_requests or max(_MIN_REQUESTS, _REQUESTS_PER_CLIENT * number)
        trace = make_trace(trace_settings(replace(drawn, num_requests=num_requests), info, number))
        with console.status(f"{num_requests} requests of {number} clients"):
            await client.reset_prefix_cache()
            async with StepRecorder(client) as recorder:
                load = await closed_loop(send, trace, number)
        runs[number] = Run(trace, load, [_measured(step) for step in recorder.steps])
    return runs


def predict(info: ServerInfo, runs: dict[int, Run], settings: PredictionSettings) -> Prediction:
    """Fits to the runs that are to be fitted to, and simulates all."""
    fit = fit_cost(*(timed(runs[number].steps) for number in settings.fitted))
    pause_s = turnaround_s(runs[min(settings.fitted)].steps) or 0.0
    comparisons = tuple(
        _compare(number, run, number in settings.fitted, info, fit, pause_s) for number, run in runs.items()
    )
    errors = [abs(comparison.error_ratio) for comparison in comparisons if not comparison.is_fitted]
    return Prediction(info.model_name, fit, pause_s, comparisons, max(errors, default=0.0))


def _compare(number: int, run: Run, is_fitted: bool, info: ServerInfo, fit: Fit, pause_s: float) -> Comparison:
    clients = ClosedLoop(number, pause_s)
    records = simulate_trace(info, run.trace, fit, clients)
    own = simulate_trace(info, run.trace, fit_cost(timed(run.steps)), clients)
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


def simulate_trace(info: ServerInfo, trace: Sequence[TraceRequest], fit: Fit, clients: ClosedLoop) -> Records:
    """The trace, as that server would serve it."""
    server = Server(
        SchedulerLimits(info.max_num_seqs, info.max_num_batched_tokens, info.max_model_len),
        num_blocks=info.num_blocks + 1,
        block_size=info.block_size,
    )
    jobs = [Job(0.0, 0, len(request.prompt_token_ids), request.max_tokens) for request in trace]
    return Simulation(server, [ListedJobs(jobs, clients)], fit.cost, Horizon(num_requests=len(jobs))).run()


def render_table(prediction: Prediction) -> Table:
    """Narrow enough for 80 columns."""
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
    """0 of nothing."""
    found = list(values)
    return median(found) if found else 0.0


def _measured(step: StepTrace) -> MeasuredStep:
    load = measured_load(
        step.num_sequences, step.num_tokens, step.num_decodes, step.num_decode_pairs, step.num_prefill_pairs
    )
    return MeasuredStep(step.epoch, step.planned_ns / 1e9, step.received_ns / 1e9, load)
