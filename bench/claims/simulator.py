"""Claim of this project: the simulator predicts real services, and simulates a day of traffic in minutes."""

import asyncio
import statistics
from dataclasses import asdict, replace

from matplotlib.figure import Figure
from rich.console import Console

from bench.claims.claim import Claim, Data, Plot, Setting, Table, Verdict, Watch, judged, percent
from bench.claims.drawing import BLUE, GREY, ORANGE, RED, powers_axis
from bench.claims.served import at_services
from bench.serving.prediction import PredictionSettings, measure_and_predict
from planning.run import simulate
from planning.settings import SimulateSettings
from planning.summary import timeline

_MAX_ERROR = 0.15
_MIN_REAL_TIME_FACTOR = 1000.0
_DAY_S = 86_400.0
_DAY_MODEL, _DAY_DEVICE, _DAY_RATE, _DAY_SWING = "llama-3.1-8b", "h100", 2.0, 0.8


async def measure(setting: Setting, watch: Watch) -> Data:
    settings = PredictionSettings(seed=setting.seed, device=setting.flags.get("device", "auto"))
    if setting.is_quick:
        settings = replace(settings, fitted=(1, 4), predicted=(2,), num_requests=8)
    watch.expect(2)
    watch.step(f"runs of {', '.join(map(str, sorted({*settings.fitted, *settings.predicted})))} clients")
    prediction = await at_services(
        setting, {}, lambda address: measure_and_predict(address, settings, Console(quiet=True))
    )
    watch.step("a day of traffic")
    day = await asyncio.to_thread(_day, setting.seed, 600.0 if setting.is_quick else _DAY_S)
    return {"prediction": asdict(prediction), "day": day}


def _day(seed: int, duration_s: float) -> Data:
    settings = SimulateSettings(
        device=_DAY_DEVICE, rate=_DAY_RATE, daily_swing=_DAY_SWING, lengths="sharegpt", duration_s=duration_s, seed=seed
    )
    outcome = simulate(_DAY_MODEL, settings)
    kept = ("time_s", "num_running", "num_waiting")
    return {
        "model": _DAY_MODEL,
        "device": _DAY_DEVICE,
        "rate": _DAY_RATE,
        "swing": _DAY_SWING,
        "duration_s": duration_s,
        "summary": asdict(outcome.summary),
        "timeline": [{name: sample[name] for name in kept} for sample in timeline(outcome.records)],
    }


def conditions(data: Data) -> str:
    prediction, day = data["prediction"], data["day"]
    fitted, predicted = (
        ", ".join(str(row["num_clients"]) for row in prediction["comparisons"] if row["is_fitted"] is is_fitted)
        for is_fitted in (True, False)
    )
    return (
        "The shipped scheduler core on a virtual clock. The cost of a step is a line that is fitted to "
        f"{prediction['fit']['num_steps']:,} steps of this machine with {fitted} clients. It predicts runs with "
        f"{predicted} clients, which it was not fitted to, on real services with mixed lengths in a closed loop. The "
        f"simulated day: {day['model']} on one {day['device'].upper()}, computed from its data sheet, at a mean of "
        f"{day['rate']:g} requests/s, {percent(day['swing'], 0)} more or less over 24 hours, with ShareGPT-like "
        f"lengths, for {day['duration_s'] / 3600:.3g} hours."
    )


def verdict(data: Data) -> Verdict:
    prediction, summary = data["prediction"], data["day"]["summary"]
    tested = [row for row in prediction["comparisons"] if not row["is_fitted"]]
    errors = [abs(row["error_ratio"]) for row in tested]
    factor = summary["real_time_factor"]
    worst = max(tested, key=lambda row: abs(row["error_ratio"]))
    ours = (
        f"throughput predicted within {percent(max(errors))}; {data['day']['duration_s'] / 3600:.3g} hours of 8B "
        f"traffic simulated in {summary['wall_s']:.0f} s ({factor:,.0f} × real time)"
    )
    reason = (
        f"Worst at {worst['num_clients']} clients: {worst['predicted_tokens_per_s']:,.0f} output tokens/s predicted, "
        f"{worst['measured_tokens_per_s']:,.0f} measured; {percent(statistics.fmean(errors))} off in the mean. A "
        f"measured step is off the fitted line by {percent(prediction['fit']['mean_error_ratio'], 0)} on average, "
        "because the speed of the machine varies. "
        f"The simulated day serves {summary['num_requests']:,} requests in {summary['num_steps']:,} steps; "
        f"{percent(summary['num_leapt_steps'] / max(1, summary['num_steps']), 0)} of them were simulated many at once. "
        "The simulated device was not measured: its data sheet and the efficiencies are assumptions. The speed of the "
        "simulation depends on the rate of requests and on the version: docs/planning.md, “How fast”, has newer ones."
    )
    return Verdict(judged([max(errors) <= _MAX_ERROR, factor >= _MIN_REAL_TIME_FACTOR]), ours, reason)


def tables(data: Data) -> list[Table]:
    rows = tuple(
        (
            f"{row['num_clients']}{', fitted' if row['is_fitted'] else ''}",
            f"{row['measured_tokens_per_s']:,.0f}",
            f"{row['predicted_tokens_per_s']:,.0f}",
            f"{100 * row['error_ratio']:+.1f} %",
            f"{1e3 * row['measured_ttft_s']:.1f}",
            f"{1e3 * row['predicted_ttft_s']:.1f}",
            f"{1e3 * row['measured_tpot_s']:.2f}",
            f"{1e3 * row['predicted_tpot_s']:.2f}",
        )
        for row in data["prediction"]["comparisons"]
    )
    headings = ("clients", "tokens/s", "predicted", "off by", "TTFT, ms", "predicted", "TPOT, ms", "predicted")
    summary = data["day"]["summary"]
    latency = summary["tenants"][0]["latency_s"]
    day = (
        ("requests", f"{summary['num_requests']:,}"),
        ("output tokens/s", f"{summary['output_tokens_per_s']:,.0f}"),
        ("sequences per step, mean and most", f"{summary['mean_batch']:.1f}, {summary['max_batch']}"),
        ("executor busy", percent(summary["busy_ratio"], 0)),
        ("latency p50, p99", f"{latency['p50']:.1f} s, {latency['p99']:.1f} s"),
        ("waste", percent(summary["waste_ratio"])),
        ("simulated in", f"{summary['wall_s']:.1f} s"),
    )
    return [
        Table("Predicted and measured, on this machine; TTFT and TPOT are medians.", headings, rows),
        Table("The simulated day on that device.", ("", "value"), day),
    ]


def plots(data: Data) -> list[Plot]:
    validation = (
        "Output tokens per second, measured and predicted, by number of clients; the band is 15 % around measured."
    )
    day = "The simulated day: sequences that run and that wait, over time."
    return [
        Plot("simulator-validation", validation, lambda figure: _draw_validation(figure, data), (9.0, 3.8)),
        Plot("simulator-day", day, lambda figure: _draw_day(figure, data), (9.6, 3.4)),
    ]


def _draw_validation(figure: Figure, data: Data) -> None:
    axes = figure.subplots()
    rows = data["prediction"]["comparisons"]
    numbers = [row["num_clients"] for row in rows]
    measured = [row["measured_tokens_per_s"] for row in rows]
    low, high = ([(1 + sign * _MAX_ERROR) * rate for rate in measured] for sign in (-1, 1))
    axes.fill_between(numbers, low, high, color=GREY, alpha=0.25, linewidth=0, label="within 15 %")
    axes.plot(numbers, measured, marker="o", color=BLUE, label="measured")
    for is_fitted, face, label in ((False, ORANGE, "predicted"), (True, "none", "predicted, of the runs fitted to")):
        chosen = [row for row in rows if row["is_fitted"] is is_fitted]
        axes.plot(
            [row["num_clients"] for row in chosen],
            [row["predicted_tokens_per_s"] for row in chosen],
            marker="s",
            markersize=7,
            linestyle="none",
            color=ORANGE,
            markerfacecolor=face,
            label=label,
        )
    powers_axis(axes, numbers, "clients")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("output tokens/s")
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
    source="This project: docs/planning.md",
    figure="throughput within 15 % of what is measured; at least 1,000 × real time for 8B on one H100",
    measure=measure,
    conditions=conditions,
    verdict=verdict,
    tables=tables,
    plots=plots,
)
