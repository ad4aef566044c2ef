"""Claim of our own: the simulator says what real services do. Steps are measured, a run is predicted, then made."""

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import asdict

from matplotlib.figure import Figure

from bench.claims.claim import Claim, Data, Plot, Setting, Table, Verdict, Watch, judged, percent
from bench.claims.drawing import BLUE, GREY, ORANGE, RED, powers_axis
from bench.claims.served import run_load, trace_for, warm_up, with_services
from bench.trace import TraceRequest
from planning.arrivals import ClosedLoop
from planning.fit import Fit, fit_cost
from planning.measured_steps import MeasuredStep, measured_load, timed, turnaround_s
from planning.run import simulate
from planning.server import Server
from planning.settings import SimulateSettings
from planning.simulation import Horizon, Simulation
from planning.summary import Summary, summarize, timeline
from planning.workload import Job, ListedJobs
from quire.async_client import AsyncClient
from quire.block_map import ServerInfo, StepTrace
from scheduler.core import Limits

_MAX_ERROR = 0.15
_MIN_REAL_TIME_FACTOR = 1000.0
_DAY_S = 86_400.0
_DAY_MODEL, _DAY_DEVICE, _DAY_RATE, _DAY_SWING = "llama-3.1-8b", "h100", 8.0, 0.6
_FIT_SEED = 1_000


async def measure(setting: Setting, watch: Watch) -> Data:
    concurrencies = (1, 4) if setting.is_quick else (1, 4, 16, 64)
    day_s = 600.0 if setting.is_quick else _DAY_S
    watch.expect(2 * len(concurrencies) + 2)
    to_fit: list[StepTrace] = []
    runs: list[Data] = []
    traces: dict[int, list[TraceRequest]] = {}

    async def measure_runs(client: AsyncClient) -> ServerInfo:
        info = await client.server_info()
        fit_setting = Setting(setting.model, setting.is_quick, setting.seed + _FIT_SEED, setting.flags)
        await warm_up(client, trace_for(setting, info, 8, 0))
        for number in concurrencies:
            num_requests = 2 * number if setting.is_quick else max(12, 4 * number)
            watch.step(f"steps to fit, {number} clients")
            to_fit.extend((await run_load(client, trace_for(fit_setting, info, num_requests, number), number)).steps)
            watch.step(f"the run to predict, {number} clients")
            traces[number] = trace_for(setting, info, num_requests, number)
            runs.append((await run_load(client, traces[number], number)).row())
        return info

    info = await with_services(setting, {}, measure_runs)
    watch.step("predicting")
    steps = [_measured(step) for step in to_fit]
    fit, pause_s = fit_cost(timed(steps)), turnaround_s(steps) or 0.0
    rows = [_predicted(run, traces[run["concurrency"]], info, fit, pause_s) for run in runs]
    watch.step("a day of traffic")
    day = await asyncio.to_thread(_day, setting.seed, day_s)
    return {"fit": asdict(fit), "turnaround_s": pause_s, "rows": rows, "day": day}


def _measured(step: StepTrace) -> MeasuredStep:
    load = measured_load(
        step.num_sequences, step.num_tokens, step.num_decodes, step.num_decode_pairs, step.num_prefill_pairs
    )
    return MeasuredStep(step.epoch, step.planned_ns / 1e9, step.received_ns / 1e9, load)


def _predicted(run: Data, trace: Sequence[TraceRequest], info: ServerInfo, fit: Fit, pause_s: float) -> Data:
    limits = Limits(info.max_num_seqs, info.max_num_batched_tokens, info.max_model_len)
    server = Server(limits, info.num_blocks + 1, info.block_size)
    jobs = [Job(0.0, 0, len(request.prompt_token_ids), request.max_tokens) for request in trace]
    source = ListedJobs(jobs, ClosedLoop(run["concurrency"], pause_s))
    records = Simulation(server, [source], fit.cost, Horizon(num_requests=len(jobs))).run()
    found = summarize(records, ["requests"], info.num_blocks, 0.0)
    tenant = found.tenants[0]
    return run | {
        "predicted_requests_per_s": found.requests_per_s,
        "predicted_mean_batch": found.mean_batch,
        "predicted_ttft_p50_ms": tenant.ttft_s.p50 * 1e3 if tenant.ttft_s else None,
        "predicted_latency_p50_ms": tenant.latency_s.p50 * 1e3 if tenant.latency_s else None,
        "error_ratio": found.requests_per_s / run["requests_per_s"] - 1,
    }


def _day(seed: int, duration_s: float) -> Data:
    asked = SimulateSettings(
        device=_DAY_DEVICE, rate=_DAY_RATE, daily_swing=_DAY_SWING, lengths="sharegpt", duration_s=duration_s, seed=seed
    )
    outcome = simulate(_DAY_MODEL, asked)
    summary: Summary = outcome.summary
    kept = ("time_s", "num_running", "num_waiting", "num_ended")
    return {
        "model": _DAY_MODEL,
        "device": _DAY_DEVICE,
        "rate": _DAY_RATE,
        "swing": _DAY_SWING,
        "duration_s": duration_s,
        "summary": asdict(summary),
        "timeline": [{name: sample[name] for name in kept} for sample in timeline(outcome.records)],
    }


def conditions(data: Data) -> str:
    day = data["day"]
    return (
        "The shipped scheduler core on a virtual clock. A step's cost is a line fitted to "
        f"{data['fit']['num_steps']:,} steps "
        "of this machine, taken on other requests than those that are predicted; then the same trace is simulated "
        "and served, "
        f"mixed lengths, closed loop. The day: {day['model']} on one {day['device'].upper()}, computed from its data "
        "sheet, "
        f"{day['rate']:g} requests/s in the mean with a swing of {percent(day['swing'], 0)} over 24 hours, "
        "ShareGPT-like lengths, "
        f"{day['duration_s'] / 3600:.3g} hours."
    )


def verdict(data: Data) -> Verdict:
    errors = [abs(row["error_ratio"]) for row in data["rows"]]
    summary = data["day"]["summary"]
    factor = summary["real_time_factor"]
    worst = max(data["rows"], key=lambda row: abs(row["error_ratio"]))
    ours = (
        f"throughput predicted within {percent(max(errors))}; {data['day']['duration_s'] / 3600:.3g} hours of 8B "
        "traffic in "
        f"{summary['wall_s']:.0f} s ({factor:,.0f} × real time)"
    )
    reason = (
        f"Worst at {worst['concurrency']} clients: {worst['predicted_requests_per_s']:.2f} requests/s predicted, "
        f"{worst['requests_per_s']:.2f} measured; {percent(statistics.fmean(errors))} off in the mean. A measured "
        "step is "
        f"{percent(data['fit']['mean_error_ratio'], 0)} off the fitted line in the mean, which is the machine's own "
        "unrest. "
        f"The simulated day serves {summary['num_requests']:,} requests in {summary['num_steps']:,} steps, "
        f"{percent(summary['num_leapt_steps'] / max(1, summary['num_steps']), 0)} of them taken many at once. What "
        "the H100 would "
        "really do has not been measured: the figures of its data sheet and the efficiencies are assumptions."
    )
    return Verdict(judged([max(errors) <= _MAX_ERROR, factor >= _MIN_REAL_TIME_FACTOR]), ours, reason)


def tables(data: Data) -> list[Table]:
    rows = tuple(
        (
            str(row["concurrency"]),
            f"{row['requests_per_s']:.2f}",
            f"{row['predicted_requests_per_s']:.2f}",
            f"{100 * row['error_ratio']:+.1f} %",
            f"{row['mean_batch']:.1f}",
            f"{row['predicted_mean_batch']:.1f}",
            f"{row['latency_p50_ms']:.0f}",
            f"{row['predicted_latency_p50_ms']:.0f}",
        )
        for row in data["rows"]
    )
    headings = (
        "clients",
        "requests/s",
        "predicted",
        "off by",
        "sequences a step",
        "predicted",
        "latency p50, ms",
        "predicted",
    )
    summary = data["day"]["summary"]
    latency = summary["tenants"][0]["latency_s"]
    day = (
        ("requests", f"{summary['num_requests']:,}"),
        ("output tokens/s", f"{summary['output_tokens_per_s']:,.0f}"),
        ("sequences a step, mean and most", f"{summary['mean_batch']:.1f}, {summary['max_batch']}"),
        ("busy", percent(summary["busy_ratio"], 0)),
        ("latency p50, p99", f"{latency['p50']:.1f} s, {latency['p99']:.1f} s"),
        ("waste", percent(summary["waste_ratio"])),
        ("simulated in", f"{summary['wall_s']:.1f} s"),
    )
    return [
        Table("Predicted and measured, on this machine.", headings, rows),
        Table("The simulated day, as it would be on that device.", ("", "value"), day),
    ]


def plots(data: Data) -> list[Plot]:
    validation = (
        "Requests per second, measured and predicted, against the number of clients; the band is 15 % around measured."
    )
    day = "The simulated day: sequences that run and that wait, over time."
    return [
        Plot("simulator-validation", validation, lambda figure: _draw_validation(figure, data), (9.0, 3.8)),
        Plot("simulator-day", day, lambda figure: _draw_day(figure, data), (9.6, 3.4)),
    ]


def _draw_validation(figure: Figure, data: Data) -> None:
    axes = figure.subplots()
    rows = data["rows"]
    numbers = [row["concurrency"] for row in rows]
    measured = [row["requests_per_s"] for row in rows]
    low, high = ([(1 + sign * _MAX_ERROR) * rate for rate in measured] for sign in (-1, 1))
    axes.fill_between(numbers, low, high, color=GREY, alpha=0.25, linewidth=0, label="within 15 %")
    axes.plot(numbers, measured, marker="o", color=BLUE, label="measured")
    predicted = [row["predicted_requests_per_s"] for row in rows]
    axes.plot(numbers, predicted, marker="s", linestyle="--", color=ORANGE, label="predicted")
    powers_axis(axes, numbers, "clients")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("requests/s")
    axes.legend(loc="lower right")


def _draw_day(figure: Figure, data: Data) -> None:
    axes = figure.subplots()
    samples = data["day"]["timeline"]
    hours = [sample["time_s"] / 3600 for sample in samples]
    axes.plot(hours, [sample["num_running"] for sample in samples], color=BLUE, linewidth=1.1, label="running")
    axes.plot(hours, [sample["num_waiting"] for sample in samples], color=RED, linewidth=1.1, label="waiting")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("virtual time, hours")
    axes.set_ylabel("sequences")
    axes.legend(loc="upper left")


CLAIM = Claim(
    name="simulator",
    title="The simulator predicts the services",
    source="This project: `quire simulate` is to be within 15 % of what is measured, and to simulate a day of 8B "
    "traffic in minutes",
    figure="throughput within 15 %; at least 1,000 × real time for 8B on one H100",
    measure=measure,
    conditions=conditions,
    verdict=verdict,
    tables=tables,
    plots=plots,
)
