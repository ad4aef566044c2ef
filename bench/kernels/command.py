"""Time and rate of every operation of `kernels`, and its share of the machine's ceiling.

    python -m bench kernels                          # on the GPU if there is one, else on the CPU
    python -m bench kernels --device cpu --quick
    python -m bench kernels --json bench/results/kernels.json

On a GPU decodes and elementwise operations run in a captured graph, as in serving; prefills and rows that say
`launched` include the cost of launches. On the CPU everything runs on one thread and on all threads.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

import kernels
from bench.command_line import Parser, open_console
from bench.kernels.cases import Case
from bench.kernels.ceilings import Ceilings, measure_ceilings
from bench.kernels.grid import cpu_cases, gpu_cases
from bench.machine import describe_machine
from bench.report import save
from bench.stopwatch import time_rounds
from executor.device.free_memory import free_memory_bytes

_BUDGET_S, _QUICK_BUDGET_S = 0.3, 0.03
_FREE_SHARE = 0.9  # the rest is for results, which a round allocates


@dataclass(frozen=True, slots=True)
class KernelRow:
    """The measurement of one case.

    mode           "graph" or "launched" on a GPU; "wall" on the CPU, or "cpu time" with one thread
    num_threads    threads on the CPU; None on a GPU
    gb_per_s       rate of the bytes that a call must move; None if arithmetic is the bound
    tflops         None if memory is the bound
    ceiling_share  share of the ceiling that `ceiling` names (copy, read or gemm), measured in this run
    spread_ratio   (90th - 10th percentile) / median
    skipped        the reason why it was not run
    error          the reason why it failed
    """

    operation: str
    label: str
    dtype: str
    mode: str
    num_threads: int | None
    ceiling: str
    us: float | None = None
    gb_per_s: float | None = None
    tflops: float | None = None
    ceiling_share: float | None = None
    spread_ratio: float | None = None
    skipped: str | None = None
    error: str | None = None

    @property
    def name(self) -> str:
        return f"{self.operation} {self.label}"


@dataclass(frozen=True, slots=True)
class Settings:
    """The device, and the time of each case.

    num_threads  numbers of threads on the CPU, measured one after the other
    """

    device: torch.device
    budget_s: float
    is_quick: bool
    num_threads: tuple[int, ...]


def measure(settings: Settings, keep: Callable[[dict[str, Any]], None]) -> list[KernelRow]:
    """Measures all cases of the device. `keep` takes the whole report after each row."""
    rows: list[KernelRow] = []
    described = describe_machine(settings.device)
    ceilings: dict[str, dict[str, Any]] = {}
    with torch.inference_mode():
        for num_threads, cases in _rounds(settings):
            dtypes = tuple(dict.fromkeys(case.dtype for case in cases))
            measured = measure_ceilings(settings.device, dtypes, settings.budget_s)
            ceilings["device" if num_threads is None else f"{num_threads} threads"] = asdict(measured)
            for case in cases:
                rows.append(_measure_case(case, settings, measured, num_threads))
                keep({"machine": described, "ceilings": ceilings, "rows": [asdict(row) for row in rows]})
    return rows


def _rounds(settings: Settings) -> Iterator[tuple[int | None, list[Case]]]:
    """Yields each number of threads with the cases to measure, while torch is set to that number."""
    if settings.device.type == "cuda":
        yield None, gpu_cases()
        return
    before = torch.get_num_threads()
    try:
        for num_threads in settings.num_threads:
            torch.set_num_threads(num_threads)
            dtypes = (torch.float32, torch.bfloat16)
            yield num_threads, [case for dtype in dtypes for case in cpu_cases(dtype, is_quick=settings.is_quick)]
    finally:
        torch.set_num_threads(before)


def _measure_case(case: Case, settings: Settings, ceilings: Ceilings, num_threads: int | None) -> KernelRow:
    """Measures one case. A case that fails, or does not fit the memory, becomes a row that says so."""
    device = settings.device
    in_graph = case.in_graph and device.type == "cuda"
    known: dict[str, Any] = {
        "operation": case.operation,
        "label": case.label,
        "dtype": str(case.dtype).removeprefix("torch."),
        "mode": _mode(device, in_graph, num_threads),
        "num_threads": num_threads,
        "ceiling": case.ceiling,
    }
    needed_bytes, free_bytes = case.buffer_bytes(device), free_memory_bytes(device)
    if needed_bytes > _FREE_SHARE * free_bytes:
        reason = f"needs {needed_bytes / 1e9:.3g} GB, {free_bytes / 1e9:.3g} GB are free"
        return KernelRow(**known, skipped=reason)
    try:
        prepared = case.prepare(kernels.select(device), device)
        timing = time_rounds(prepared.run, prepared.num_calls, device, settings.budget_s, in_graph=in_graph)
    except Exception as error:  # noqa: BLE001  # from any operation, or from the compiler
        return KernelRow(**known, error=f"{type(error).__name__}: {error}"[:500])
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if case.num_flops:
        tflops = case.num_flops / timing.median_s / 1e12
        rates: dict[str, Any] = {"tflops": tflops, "ceiling_share": tflops / ceilings.gemm_tflops[known["dtype"]]}
    else:
        gb_per_s = case.num_bytes / timing.median_s / 1e9
        best = ceilings.read_gb_per_s if case.ceiling == "read" else ceilings.copy_gb_per_s
        rates = {"gb_per_s": gb_per_s, "ceiling_share": gb_per_s / best}
    return KernelRow(**known, **rates, us=timing.median_s * 1e6, spread_ratio=timing.spread_ratio)


def _mode(device: torch.device, in_graph: bool, num_threads: int | None) -> str:
    if device.type == "cuda":
        return "graph" if in_graph else "launched"
    return "cpu time" if num_threads == 1 else "wall"


def render_table(report: dict[str, Any]) -> Table:
    """Returns a table with one line for each row, and the ceilings as its caption."""
    table = Table(
        title=report["machine"]["device"], caption=_ceilings_line(report["ceilings"]), box=None, pad_edge=False
    )
    table.add_column("operation", no_wrap=True)
    table.add_column("case", no_wrap=True)
    table.add_column("dtype", no_wrap=True)
    table.add_column("mode", no_wrap=True)
    for heading in ("µs", "rate", "of", "share", "spread"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in report["rows"]:
        mode = row["mode"] if row["num_threads"] is None else f"{row['num_threads']} thr"
        table.add_row(row["operation"], row["label"], row["dtype"], mode, *_numbers(row))
    return table


def _numbers(row: dict[str, Any]) -> list[str]:
    if row["skipped"] is not None:
        return ["skipped", row["skipped"]]
    if row["error"] is not None:
        return ["failed", row["error"].splitlines()[0][:40]]
    rate = f"{row['gb_per_s']:.1f} GB/s" if row["tflops"] is None else f"{row['tflops']:.3g} TFLOP/s"
    return [f"{row['us']:.1f}", rate, row["ceiling"], f"{row['ceiling_share']:.0%}", f"{row['spread_ratio']:.0%}"]


def _ceilings_line(ceilings: dict[str, dict[str, Any]]) -> str:
    lines = []
    for where, best in ceilings.items():
        products = ", ".join(f"{dtype} {tflops:.3g}" for dtype, tflops in best["gemm_tflops"].items())
        lines.append(
            f"{where}: copy {best['copy_gb_per_s']:.1f} GB/s, read {best['read_gb_per_s']:.1f} GB/s, TFLOP/s {products}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    parser = Parser("kernels", __doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    parser.add_argument("--json", type=Path, help="file of results")
    parser.add_argument("--threads", help="numbers of CPU threads, separated by commas (default: one, and all)")
    parser.add_argument("--quick", action="store_true", help="fewer cases, shorter: for tests")
    given = parser.parse_args(arguments)
    device = torch.device(given.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    report: dict[str, Any] = {}

    def keep(now: dict[str, Any]) -> None:
        report.update(now)
        if given.json is not None:
            save(given.json, now)

    threads = given.threads or f"1,{len(os.sched_getaffinity(0))}"
    num_threads = tuple(dict.fromkeys(int(number) for number in threads.split(",")))
    measure(Settings(device, _QUICK_BUDGET_S if given.quick else _BUDGET_S, given.quick, num_threads), keep)
    open_console().print(render_table(report))
