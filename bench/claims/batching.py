"""Claim: from about 16 clients on, continuous batching is faster than dynamic and static batching. Real services."""

import statistics

from matplotlib.figure import Figure

from bench.claims.claim import Claim, Data, Plot, Setting, Table, Verdict, Watch, judged, percent
from bench.claims.drawing import MODE_COLOURS, powers_axis
from bench.claims.served import Served, num_equal, run_load, trace_for, warm_up, with_services
from quire.async_client import AsyncClient

BATCHING_NAMES = ("continuous", "dynamic", "static")
_TO_PASS = 2.0
_AT_CLIENTS = 32
_FROM_CLIENTS = 16


async def measure(setting: Setting, watch: Watch) -> Data:
    """Measures each mode on its own services. The modes alternate, so that a slow minute affects all of them."""
    concurrencies = (1, 4) if setting.is_quick else (1, 4, 8, 16, 32, 64)
    num_rounds = 1 if setting.is_quick else 2
    watch.expect(num_rounds * len(BATCHING_NAMES) * len(concurrencies))
    runs: list[tuple[str, int, Served]] = []
    for _ in range(num_rounds):
        for batching in BATCHING_NAMES:
            runs += await _measure_mode(setting, watch, batching, concurrencies)
    reference = {number: served for batching, number, served in runs if batching == "continuous"}
    rows = [
        served.row()
        | {
            "batching": batching,
            "num_equal_outputs": num_equal(reference[number].outputs, served.outputs),
        }
        for batching, number, served in runs
    ]
    return {"num_rounds": num_rounds, "rows": rows, "curves": _curves(runs)}


async def _measure_mode(
    setting: Setting, watch: Watch, batching: str, concurrencies: tuple[int, ...]
) -> list[tuple[str, int, Served]]:
    async def measure(client: AsyncClient) -> list[tuple[str, int, Served]]:
        info = await client.server_info()
        await warm_up(client, trace_for(setting, info, 8, 0))
        runs = []
        for number in concurrencies:
            watch.step(f"{batching}, {number} clients")
            num_requests = 2 * number if setting.is_quick else max(12, 4 * number)
            trace = trace_for(setting, info, num_requests, number)
            runs.append((batching, number, await run_load(client, trace, number)))
        return runs

    return await with_services(setting, {"batching": batching}, measure)


def _curves(runs: list[tuple[str, int, Served]]) -> list[Data]:
    """Returns sequences per step over time, for one run of each mode with the largest number of clients."""
    most = max(number for _, number, _ in runs)
    return [
        {"batching": name, "num_clients": most}
        | next(served.curve() for batching, number, served in runs if (batching, number) == (name, most))
        for name in BATCHING_NAMES
    ]


def medians(data: Data) -> dict[str, dict[int, Data]]:
    """Returns the medians of the runs, by mode and number of clients."""
    found: dict[str, dict[int, Data]] = {}
    for row in data["rows"]:
        found.setdefault(row["batching"], {}).setdefault(row["concurrency"], row)
    names = ("requests_per_s", "output_tokens_per_s", "ttft_p50_ms", "latency_p50_ms", "mean_batch", "mean_step_ms")
    for batching, by_number in found.items():
        for number in by_number:
            of_run = [r for r in data["rows"] if (r["batching"], r["concurrency"]) == (batching, number)]
            by_number[number] = {name: statistics.median(run[name] for run in of_run) for name in names}
            by_number[number]["is_equal"] = all(run["num_equal_outputs"] == run["num_requests"] for run in of_run)
            rates = [run["requests_per_s"] for run in of_run]
            by_number[number]["spread"] = (max(rates) - min(rates)) / statistics.median(rates)
    return found


def conditions(data: Data) -> str:
    most = max(row["num_requests"] for row in data["rows"])
    return (
        "Real services on this machine, one pair for each mode, with clients on the same cores; a closed loop of "
        "greedy requests with mixed lengths (log-normal, means of 130 + 90 tokens before they are scaled to the "
        f"model). All modes get the same trace, with four requests for each client, at most {most}. The figures are "
        f"medians of {data['num_rounds']} alternating rounds. A static batch consists of the requests that wait when "
        "the last batch has ended. A sequence that has ended is not computed any more, so static batching pays for "
        "empty slots, not for padding."
    )


def verdict(data: Data) -> Verdict:
    found = medians(data)
    numbers = sorted(found["continuous"])
    at = _AT_CLIENTS if _AT_CLIENTS in numbers else numbers[-1]
    ratios = {name: found["continuous"][at]["requests_per_s"] / found[name][at]["requests_per_s"] for name in found}
    large = [number for number in numbers if number >= min(_FROM_CLIENTS, numbers[-1])]
    leads = all(
        found["continuous"][number]["requests_per_s"] > found[name][number]["requests_per_s"]
        for number in large
        for name in ("dynamic", "static")
    )
    ours = (
        f"with {at} clients, continuous serves {found['continuous'][at]['requests_per_s']:.1f} requests/s, "
        f"{ratios['dynamic']:.2f} × dynamic, {ratios['static']:.2f} × static"
    )
    continuous, static = found["continuous"][at], found["static"][at]
    reason = (
        f"From {large[0]} clients on, continuous is {'ahead at every number' if leads else 'not ahead everywhere'}. "
        f"With {at} clients, a step computes {continuous['mean_batch']:.1f} sequences in "
        f"{continuous['mean_step_ms']:.1f} ms with continuous batching, and {static['mean_batch']:.1f} in "
        f"{static['mean_step_ms']:.1f} ms with static batching: slots are "
        f"{continuous['mean_batch'] / static['mean_batch']:.1f} times as full, and a step takes "
        f"{continuous['mean_step_ms'] / static['mean_step_ms']:.1f} times as long."
    )
    if ratios["static"] < _TO_PASS:
        reason += (
            " That is why continuous does not reach twice the requests of static: here each sequence makes a step more "
            "expensive, so an empty slot costs less than a full one. That would not be so on a device whose steps are "
            "bound by reading weights."
        )
    is_same = all(entry["is_equal"] for by_number in found.values() for entry in by_number.values())
    reason += " Greedy outputs are the same in all modes." if is_same else " Some greedy outputs differ between runs."
    return Verdict(judged([leads, ratios["static"] >= _TO_PASS]), ours, reason)


def tables(data: Data) -> list[Table]:
    found = medians(data)
    rows = []
    for number in sorted(found["continuous"]):
        for name in BATCHING_NAMES:
            run = found[name][number]
            ratio = found["continuous"][number]["requests_per_s"] / run["requests_per_s"]
            rows.append(
                (
                    f"{number}, {name}",
                    f"{run['requests_per_s']:.2f}",
                    f"{ratio:.2f} ×",
                    f"{run['output_tokens_per_s']:.0f}",
                    f"{run['ttft_p50_ms']:.0f}",
                    f"{run['latency_p50_ms']:.0f}",
                    f"{run['mean_batch']:.1f}",
                    f"{run['mean_step_ms']:.2f}",
                    percent(run["spread"], 0),
                )
            )
    headings = (
        "clients, batching",
        "requests/s",
        "continuous is",
        "tokens/s",
        "TTFT p50, ms",
        "latency p50, ms",
        "sequences a step",
        "ms a step",
        "spread",
    )
    return [
        Table(
            "Medians of the rounds; spread: largest less smallest requests/s, relative to the median.",
            headings,
            tuple(rows),
        )
    ]


def plots(data: Data) -> list[Plot]:
    throughput = "Requests per second against the number of clients, in each batching mode."
    filled = "Sequences of each step over time, in each batching mode, with the largest number of clients."
    return [
        Plot("batching-throughput", throughput, lambda figure: _draw_throughput(figure, data), (9.0, 4.0)),
        Plot("batching-filling", filled, lambda figure: _draw_filling(figure, data), (9.6, 4.8)),
    ]


def _draw_throughput(figure: Figure, data: Data) -> None:
    found = medians(data)
    rates, waits = figure.subplots(1, 2)
    for name in BATCHING_NAMES:
        numbers = sorted(found[name])
        for axes, value in ((rates, "requests_per_s"), (waits, "ttft_p50_ms")):
            values = [found[name][number][value] for number in numbers]
            axes.plot(numbers, values, marker="o", color=MODE_COLOURS[name], label=name)
    for axes in (rates, waits):
        powers_axis(axes, sorted(found["continuous"]), "clients")
    rates.set_ylim(bottom=0)
    rates.set_ylabel("requests/s")
    waits.set_ylim(bottom=0)
    waits.set_ylabel("time to first token, median, ms")
    rates.legend()


def _draw_filling(figure: Figure, data: Data) -> None:
    panels = figure.subplots(len(data["curves"]), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, curve in zip(panels, data["curves"], strict=True):
        name, seconds = curve["batching"], curve["seconds"]
        axes.fill_between(
            seconds, curve["num_sequences"], step="post", color=MODE_COLOURS[name], alpha=0.75, linewidth=0
        )
        axes.set_title(f"{name}, {curve['num_clients']} clients", loc="left")
        axes.set_ylim(0, curve["num_clients"] * 1.05)
    panels[len(panels) // 2].set_ylabel("sequences of a step")
    panels[-1].set_xlim(left=0)
    panels[-1].set_xlabel("time since the first of these steps, s")


CLAIM = Claim(
    name="batching",
    title="Continuous batching is faster than dynamic and static batching",
    source="Secondary texts on continuous batching; Yu et al., “Orca”, OSDI 2022, for the idea",
    figure="from about 16 clients on, continuous is ahead of dynamic and static; to show here: at least 2 × the "
    "requests/s of static with 32 clients",
    measure=measure,
    conditions=conditions,
    verdict=verdict,
    tables=tables,
    plots=plots,
)
