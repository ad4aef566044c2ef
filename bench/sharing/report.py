"""The table, the JSON and the plot of `bench sharing`."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.sharing.cases import PAPER, Case, Mode
from bench.sharing.measure import CaseResult

COUNTED = "blocks saved by sharing over blocks in use without sharing"
PAPER_SOURCE = "Kwon et al., SOSP 2023, section 6.3 and figure 15: 2 to 6 sequences, OPT-13B"


class PlotUnavailable(Exception):
    """The plot cannot be drawn because matplotlib is not installed."""


def render_table(results: Sequence[CaseResult]) -> Table:
    """Returns a table with a row for each case.

    Blocks in use are means over the decode; `paper` is the range for 2 to 6 sequences.
    """
    table = Table(title=f"saved: {COUNTED}", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("sharing", no_wrap=True)
    for heading in ("n", "tokens", "unshared", "in use", "saved", "at peak", "CoW", "paper"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        table.add_row(
            f"{_kind(result.case)}",
            str(result.case.num_sharers),
            f"{result.mean_prompt_tokens:.0f}+{result.mean_output_tokens:.0f}",
            f"{result.mean_unshared:.1f}",
            f"{result.mean_blocks:.1f}",
            f"{result.saved_ratio:.1%}",
            f"{result.peak_saved_ratio:.1%}",
            str(result.num_cow_copies),
            _paper(result.case),
        )
    return table


def report(results: Sequence[CaseResult], server: dict[str, Any]) -> dict[str, Any]:
    """Returns the whole measurement as JSON values."""
    return {
        "counted": COUNTED,
        "server": server,
        "paper": {
            "source": PAPER_SOURCE,
            "saved": [{"mode": str(mode), "lengths": name, "range": list(r)} for (mode, name), r in PAPER.items()],
        },
        "cases": [
            asdict(result) | {"saved_ratio": result.saved_ratio, "peak_saved_ratio": result.peak_saved_ratio}
            for result in results
        ],
    }


def save_plot(results: Sequence[CaseResult], base: Path) -> Path:
    """Draws a curve for each kind of sharing, with the paper's range as a band, to BASE.png, and returns its path.

    Raises PlotUnavailable.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise PlotUnavailable("no plot without matplotlib: run pip install 'quire[bench]'") from None
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 3, sharey=True)
    for plot, mode in zip(axes, Mode, strict=True):
        of_mode = [result for result in results if result.case.mode is mode]
        for number, name in enumerate(dict.fromkeys(result.case.lengths.name for result in of_mode)):
            points = [(r.case.num_sharers, 100 * r.saved_ratio) for r in of_mode if r.case.lengths.name == name]
            plot.plot(*zip(*points, strict=True), marker="o", color=f"C{number}", label=name)
            if (mode, name) in PAPER:
                low, high = (100 * share for share in PAPER[mode, name])
                plot.axhspan(low, high, color=f"C{number}", alpha=0.15, label=f"{name}, paper, 2-6")
        plot.set_title(str(mode))
        plot.set_xlabel("requests at once" if mode is Mode.SYSTEM_PROMPT else "sequences of a request")
        plot.set_xticks(sorted({result.case.num_sharers for result in of_mode}))
        if of_mode:
            plot.legend(fontsize="small")
    axes[0].set_ylabel("blocks saved by sharing, %")
    axes[0].set_ylim(0, 100)
    base.parent.mkdir(parents=True, exist_ok=True)
    path = base.with_suffix(".png")
    figure.savefig(path, dpi=150)
    return path


def _kind(case: Case) -> str:
    return str(case.mode) if case.mode is Mode.SYSTEM_PROMPT else f"{case.mode}, {case.lengths.name}"


def _paper(case: Case) -> str:
    low, high = PAPER.get((case.mode, case.lengths.name), (None, None))
    return "" if low is None or high is None else f"{100 * low:.1f}-{100 * high:.1f}%"
