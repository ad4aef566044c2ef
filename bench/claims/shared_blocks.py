"""Claim: samples and beams of one request share most of their KV. Counted in the block tables of a server."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from rich.console import Console

from bench.claims.claim import Claim, Data, Plot, Setting, Table, Verdict, Watch, judged, percent
from bench.claims.drawing import BLUE, ORANGE, percent_axis
from bench.claims.served import at_services
from bench.sharing.cases import PAPER, Case, Mode, all_cases
from bench.sharing.measure import CaseResult, SharingSettings
from bench.sharing.measure import measure as measure_sharing
from planning.lengths import ALPACA, SHAREGPT

_TOLERANCE = 0.05
_ENOUGH = 0.75
_COLOURS = {ALPACA.name: ORANGE, SHAREGPT.name: BLUE}


async def measure(setting: Setting, watch: Watch) -> Data:
    cases = (
        [Case(Mode.SAMPLES, SHAREGPT, 2), Case(Mode.BEAMS, SHAREGPT, 2)] if setting.is_quick else all_cases((2, 4, 6))
    )
    num_requests = 2 if setting.is_quick else 8
    watch.expect(len(cases))

    async def measure_cases(address: str) -> list[CaseResult]:
        results = []
        for case in cases:
            watch.step(f"{case.num_sharers} {case.mode}, {case.lengths.name}")
            settings = SharingSettings((case,), num_requests, setting.seed)
            results += (await measure_sharing(address, settings, Console(quiet=True)))[1]
        return results

    rows = [_row(result) for result in await at_services(setting, {}, measure_cases)]
    return {"num_requests": num_requests, "rows": rows}


def _row(result: CaseResult) -> Data:
    paper = PAPER.get((result.case.mode, result.case.lengths.name))
    return {
        "mode": str(result.case.mode),
        "lengths": result.case.lengths.name,
        "num_sharers": result.case.num_sharers,
        "saved_ratio": result.saved_ratio,
        "mean_unshared": result.mean_unshared,
        "mean_blocks": result.mean_blocks,
        "mean_prompt_tokens": result.mean_prompt_tokens,
        "mean_output_tokens": result.mean_output_tokens,
        "num_cow_copies": result.num_cow_copies,
        "paper": list(paper) if paper else None,
    }


def conditions(data: Data) -> str:
    return (
        f"A real server; {data['num_requests']} requests for each case, one after the other. Lengths are log-normal "
        "with the means of the paper's figure 11, as far as the model's context allows, and the model has written the "
        "prompts. Saved: table entries less distinct blocks, divided by table entries, averaged over block maps that "
        "were read during the decodes."
    )


def verdict(data: Data) -> Verdict:
    compared = [row for row in data["rows"] if row["paper"]]
    near = [row for row in compared if row["saved_ratio"] >= row["paper"][0] - _TOLERANCE]
    saved = {
        mode: [row["saved_ratio"] for row in compared if row["mode"] == str(mode)]
        for mode in (Mode.SAMPLES, Mode.BEAMS)
    }
    groups = [row["saved_ratio"] for row in data["rows"] if row["mode"] == str(Mode.SYSTEM_PROMPT)]
    ours = f"samples {_range(saved[Mode.SAMPLES])}, beams {_range(saved[Mode.BEAMS])}" + (
        f", behind one system prompt {_range(groups)}" if groups else ""
    )
    num_copies = sum(row["num_cow_copies"] for row in data["rows"])
    reason = (
        f"{len(near)} of {len(compared)} cases save at least the lower end of the paper's range, less "
        f"{100 * _TOLERANCE:.0f} percentage points for the small number of requests. Models and texts are not the "
        f"paper's, so a closer match was not to be expected. {num_copies} blocks were copied, because "
        "a sequence wrote to a block that another one still read."
    )
    more_in_beams = _mean(saved[Mode.BEAMS]) > _mean(saved[Mode.SAMPLES])
    reason += (
        " Beams save more than samples, as in the paper." if more_in_beams else " Beams do not save more than samples."
    )
    return Verdict(judged([len(near) >= _ENOUGH * len(compared), more_in_beams]), ours, reason)


def _range(ratios: Sequence[float]) -> str:
    return f"{percent(min(ratios))} to {percent(max(ratios))}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def tables(data: Data) -> list[Table]:
    rows = tuple(
        (
            f"{row['num_sharers']} {row['mode']}, {row['lengths']}",
            f"{row['mean_prompt_tokens']:.0f} + {row['mean_output_tokens']:.0f}",
            f"{row['mean_unshared']:.1f}",
            f"{row['mean_blocks']:.1f}",
            percent(row["saved_ratio"]),
            f"{percent(row['paper'][0])} to {percent(row['paper'][1])}" if row["paper"] else "–",
            str(row["num_cow_copies"]),
        )
        for row in data["rows"]
    )
    headings = ("case", "tokens", "blocks unshared", "in use", "saved", "paper, 2 to 6", "copies")
    return [Table("Blocks with and without sharing.", headings, rows)]


def plots(data: Data) -> list[Plot]:
    caption = "Blocks saved by sharing, by the number of sequences that may share; bands are the paper's ranges."
    return [Plot("sharing", caption, lambda figure: _draw(figure, data), (9.6, 4.2))]


def _draw(figure: Figure, data: Data) -> None:
    modes = [str(mode) for mode in Mode if any(row["mode"] == str(mode) for row in data["rows"])]
    panels = figure.subplots(1, len(modes), sharey=True, squeeze=False)[0]
    for axes, mode in zip(panels, modes, strict=True):
        for name, colour in _COLOURS.items():
            rows = [row for row in data["rows"] if (row["mode"], row["lengths"]) == (mode, name)]
            if not rows:
                continue
            numbers = [row["num_sharers"] for row in rows]
            axes.plot(numbers, [100 * row["saved_ratio"] for row in rows], marker="o", color=colour, label=name)
            if rows[0]["paper"]:
                low, high = (100 * share for share in rows[0]["paper"])
                axes.axhspan(low, high, color=colour, alpha=0.16, linewidth=0, label=f"{name}, paper")
        axes.set_title(mode, loc="left")
        axes.set_xlabel("requests at once" if mode == str(Mode.SYSTEM_PROMPT) else "sequences of a request")
        axes.set_xticks(sorted({row["num_sharers"] for row in data["rows"]}))
    percent_axis(panels[0], "blocks saved, %")
    handles = {
        label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4)


CLAIM = Claim(
    name="sharing",
    title="Samples and beams share their prompt, and copy a block only to write to it",
    source="Kwon et al., SOSP 2023, section 6.3 and figure 15: OPT-13B, 2 to 6 sequences",
    figure="blocks saved: samples 6.1–9.8 % (Alpaca), 16.2–30.5 % (ShareGPT); beams 37.6–55.2 % and 44.3–66.3 %",
    measure=measure,
    conditions=conditions,
    verdict=verdict,
    tables=tables,
    plots=plots,
)
