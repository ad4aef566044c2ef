"""Claim: Quire has many times the throughput of transformers: of its `generate`, and of its continuous batching."""

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from bench.claims.claim import Claim, Data, Plot, Setting, Table, Verdict, Watch, judged
from bench.claims.drawing import BLUE, ORANGE, RED
from bench.claims.served import run_load, trace_for, warm_up, with_services
from bench.report import summarize
from bench.serving.continuous_batches import ContinuousBatches
from bench.serving.measurer import shortened
from bench.serving.static_batches import StaticBatches
from bench.trace import TraceRequest
from quire.async_client import AsyncClient

if TYPE_CHECKING:
    from bench.serving.engines import Batches

ENGINES = ("quire", "generate", "generate_batch")
_COLOURS = {"quire": BLUE, "generate": RED, "generate_batch": ORANGE}
_CLAIMED_RATIO = 24.0
_MIN_CONTINUOUS_RATIO = 2.0
_WARM_UP_TOKENS = 16
# On a CPU the manager sizes its masks by all of the host's memory.
_CPU_LIMITS = {"num_blocks": 512, "max_batch_tokens": 256}


async def measure(setting: Setting, watch: Watch) -> Data:
    """Runs the engines one after the other on the same requests. The services end before transformers begins."""
    concurrencies = (4,) if setting.is_quick else (1, 16, 64)
    watch.expect(len(concurrencies) * len(ENGINES))
    traces: dict[int, list[TraceRequest]] = {}
    dtypes: list[str] = []

    async def measure_quire(client: AsyncClient) -> list[Data]:
        info = await client.server_info()
        dtypes.append(info.dtype)
        await warm_up(client, trace_for(setting, info, 8, 0))
        rows = []
        for number in concurrencies:
            watch.step(f"quire, {number} clients")
            num_requests = number if setting.is_quick else max(6, 2 * number)
            traces[number] = trace_for(setting, info, num_requests, number)
            rows.append(_row("quire", (await run_load(client, traces[number], number)).summary))
        return rows

    rows = await with_services(setting, {}, measure_quire)
    rows += await asyncio.to_thread(_measure_transformers, setting.model, dtypes[0], traces, watch)
    return {"rows": rows, "dtype": dtypes[0]}


def _measure_transformers(model: str, dtype: str, traces: dict[int, list[TraceRequest]], watch: Watch) -> list[Data]:
    static = StaticBatches(model, dtype)
    limits = None if static.is_on_gpu else _CPU_LIMITS
    engines: dict[str, Batches] = {"generate": static, "generate_batch": ContinuousBatches(static.model, limits)}
    rows = []
    for name, engine in engines.items():
        for number, trace in traces.items():
            watch.step(f"transformers {name}, {number} clients")
            # The warm-up has as many clients as the run, so that set-up for that batch size is not measured.
            engine.run(shortened(trace[:number], _WARM_UP_TOKENS), number)
            rows.append(_row(name, asdict(summarize(name, engine.run(trace, number)))))
    return rows


def _row(engine: str, summary: Data) -> Data:
    kept = ("concurrency", "num_requests", "wall_s", "requests_per_s", "output_tokens_per_s")
    return {"engine": engine, "ttft_p50_ms": (summary["ttft_ms"] or {}).get("p50")} | {
        name: summary[name] for name in kept
    }


def by_engine(data: Data) -> dict[str, dict[int, Data]]:
    found: dict[str, dict[int, Data]] = {name: {} for name in ENGINES}
    for row in data["rows"]:
        found[row["engine"]][row["concurrency"]] = row
    return found


def conditions(data: Data) -> str:
    most = max(row["num_requests"] for row in data["rows"])
    return (
        f"One model in {data['dtype']} and one trace of mixed lengths for all three engines, {most} requests with the "
        "most clients. Each engine runs once, one after the other. Quire runs as a server with its clients on the same "
        "cores, transformers in process, without a server around it. `generate` runs padded static batches of as many "
        "requests as there are clients. `generate_batch` stands for the manager behind it, which a closed loop feeds; "
        f"on a CPU it has {_CPU_LIMITS['num_blocks']} blocks and at most {_CPU_LIMITS['max_batch_tokens']} tokens in a "
        "step. Only requested tokens count."
    )


def verdict(data: Data) -> Verdict:
    found = by_engine(data)
    most = max(found["quire"])
    quire = found["quire"][most]["output_tokens_per_s"]
    ratios = {name: quire / found[name][most]["output_tokens_per_s"] for name in ("generate", "generate_batch")}
    small = min(found["quire"])
    at_one = found["quire"][small]["output_tokens_per_s"] / found["generate"][small]["output_tokens_per_s"]
    ours = (
        f"with {most} clients {ratios['generate']:.1f} × `generate`, {ratios['generate_batch']:.1f} × "
        "`generate_batch` (output tokens/s)"
    )
    reason = (
        f"Quire generates {quire:.0f} tokens/s. The ratio to `generate` is {at_one:.1f} × already with {small} "
        f"client{'s' if small > 1 else ''}, from faster kernels and steps; the rest comes from batching. "
    )
    if ratios["generate"] < _CLAIMED_RATIO:
        reason += (
            f"Less than {_CLAIMED_RATIO:.0f} ×, because that figure compares with a server whose batch is limited by "
            "its memory, on a GPU whose step costs the same for few sequences and many. Here `generate` gets batches "
            "as large as Quire's, and each sequence makes a step more expensive. "
        )
    reason += "TGI was not run, so 2–4 × TGI is not judged."
    holds = [ratios["generate"] >= _CLAIMED_RATIO, ratios["generate_batch"] >= _MIN_CONTINUOUS_RATIO]
    return Verdict(judged(holds), ours, reason)


def tables(data: Data) -> list[Table]:
    found = by_engine(data)
    rows = []
    for number in sorted(found["quire"]):
        quire = found["quire"][number]["output_tokens_per_s"]
        for name in ENGINES:
            row = found[name][number]
            rows.append(
                (
                    f"{number}, {name}",
                    f"{row['output_tokens_per_s']:.0f}",
                    f"{quire / row['output_tokens_per_s']:.2f} ×",
                    f"{row['requests_per_s']:.2f}",
                    f"{row['ttft_p50_ms']:.0f}",
                )
            )
    headings = ("clients, engine", "tokens/s", "Quire is", "requests/s", "TTFT p50, ms")
    return [Table("The same trace through each engine.", headings, tuple(rows))]


def plots(data: Data) -> list[Plot]:
    caption = (
        "Output tokens per second of Quire, of `generate` in static batches, and of transformers' continuous batching."
    )
    return [Plot("transformers", caption, lambda figure: _draw(figure, data), (9.0, 4.0))]


def _draw(figure: Figure, data: Data) -> None:
    axes = figure.subplots()
    found = by_engine(data)
    numbers = sorted(found["quire"])
    width = 0.8 / len(ENGINES)
    for place, name in enumerate(ENGINES):
        values = [found[name][number]["output_tokens_per_s"] for number in numbers]
        left = [index - 0.4 + (place + 0.5) * width for index in range(len(numbers))]
        label = name if name == "quire" else f"transformers {name}"
        bars = axes.bar(left, values, width * 0.92, color=_COLOURS[name], label=label)
        axes.bar_label(bars, [f"{value:,.0f}" for value in values], fontsize=8, padding=2)
    axes.set_xticks(range(len(numbers)), [str(number) for number in numbers])
    axes.margins(y=0.1)
    axes.set_xlabel("clients")
    axes.set_ylabel("output tokens/s")
    axes.grid(visible=False, axis="x")
    figure.legend(loc="outside lower center", ncols=3)


CLAIM = Claim(
    name="transformers",
    title="Many times the throughput of transformers alone",
    source="The vLLM announcement (Kwon et al., blog, June 2023): up to 24 × HuggingFace Transformers, up to 3.5 × "
    "TGI; secondary texts: 24 ×, and 2–4 × TGI",
    figure="24 × `generate`; to show here: also 2 × its own continuous batching",
    measure=measure,
    conditions=conditions,
    verdict=verdict,
    tables=tables,
    plots=plots,
)
