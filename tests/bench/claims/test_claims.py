"""`bench claims` as a whole: claims that need no services are measured on a small scale, and failures are injected."""

import asyncio
import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from rich.console import Console
from typer.testing import CliRunner

import bench.claims.command as command
from bench.claims import fixed_pool, timeline
from bench.claims.catalogue import CLAIMS
from bench.claims.claim import Claim, Data, Setting, Watch, Word
from bench.claims.command import ClaimsRun, measure, rewrite, write
from bench.claims.drawing import inline_svg
from bench.claims.evidence import render_evidence
from bench.claims.outcome import Outcome, Results, ResultsError, load
from bench.claims.page import render_page
from bench.claims.runner import ProgressBars, measure_all
from bench.command_line import BenchError
from bench.machine import describe_machine
from quire.cli.main import app
from tests.support.bench import claims_data as data

CORE_ONLY = ("waste-by-kind", "waste-by-length", "timeline", "kv-arithmetic")
SAMPLES: dict[str, Data] = {
    "waste-by-kind": data.fragmentation(
        {"contiguous": 0.2, "contiguous-power-of-two": 0.3, "contiguous-exact": 0.5, "paged": 0.97}
    ),
    "waste-by-length": data.waste_by_length(15, 0.07),
    "batching": data.batching({"continuous": (20, 40), "dynamic": (15, 18), "static": (14, 16)}),
    "fixed-pool": data.fixed_pool(
        {"contiguous": 6, "contiguous-power-of-two": 20, "contiguous-exact": 30, "paged": 48}, 20.0
    ),
    "block-size": data.block_sizes((200, 100, 90), (30, 40, 41)),
    "timeline": data.timeline(
        {"static": 0.3, "dynamic": 0.3, "continuous": 0.0}, {"static": 20, "dynamic": 20, "continuous": 11}
    ),
    "sharing": data.sharing(0.2, 0.5),
    "transformers": data.transformers(6.0, 10.0),
    "kv-arithmetic": data.kv_arithmetic(40_960),
    "simulator": data.simulator(0.05, 2000.0),
    "routing": data.routing(0.05, 1.9, 2.0),
}


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def sampled_results(samples: dict[str, Data] | None = None) -> Results:
    chosen = SAMPLES if samples is None else samples
    outcomes = {
        name: Outcome(2.0, "2026-01-01T00:00:00+00:00", json.loads(json.dumps(d))) for name, d in chosen.items()
    }
    machine = {"device": "a device", "num_cpus": 2, "versions": {"torch": "2"}}
    return Results(machine, "tiny", 7, False, outcomes=outcomes)


# --- the report -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes the report of all samples once: drawing every plot takes seconds."""
    output = tmp_path_factory.mktemp("sampled")
    write(sampled_results(), output, output / "docs" / "evidence.md", quiet())
    return output


def test_report_has_every_part_of_every_claim(sampled: Path) -> None:
    results = sampled_results()
    page = (sampled / "report.html").read_text(encoding="utf-8")
    evidence = (sampled / "docs" / "evidence.md").read_text(encoding="utf-8")
    assert {claim.name for claim in CLAIMS} == set(SAMPLES)
    for claim in CLAIMS:
        verdict = results.verdict(claim)
        assert verdict.word in (Word.REPRODUCED, Word.PARTLY, Word.NOT_REPRODUCED)
        values = results.outcomes[claim.name].data
        assert values is not None
        texts = (claim.title, claim.source, claim.figure, claim.conditions(values), verdict.ours, verdict.reason)
        assert all(texts)
        assert all(text in evidence for text in texts)
        section = page[page.index(f'<section id="{claim.name}">') :].split("</section>")[0]
        assert section.count("<svg") == len(claim.plots(values)) >= 1
        assert section.count("<tbody>") == len(claim.tables(values)) >= 1
        for plot in claim.plots(values):
            assert f"](../{plot.name}.png)" in evidence
            assert (sampled / f"{plot.name}.png").read_bytes().startswith(b"\x89PNG")
    links = re.findall(r"\]\((?!#)([^)]+)\)", evidence)
    assert links
    assert all((sampled / "docs" / link).resolve().exists() for link in links)


def test_page_has_no_external_references(sampled: Path) -> None:
    page = (sampled / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|//\w|@import|<script|<link", page)
    referred = set(re.findall(r'(?:href="#|url\(#)([^")]+)', page))
    names = re.findall(r'\bid="([^"]+)"', page)
    assert referred <= set(names)
    assert len(names) == len(set(names))


def test_names_of_claims_and_plots_are_unique() -> None:
    names = [claim.name for claim in CLAIMS]
    plots = [plot.name for claim in CLAIMS for plot in claim.plots(SAMPLES[claim.name])]
    assert len(set(names)) == len(names)
    assert len(set(plots)) == len(plots)


def test_inline_plots_use_the_text_colour_of_the_page() -> None:
    (plot,) = timeline.CLAIM.plots(SAMPLES["timeline"])
    svg = inline_svg(plot)
    assert svg.startswith("<svg")
    assert "currentColor" in svg
    assert "#1f2328" not in svg
    assert "xmlns" not in svg


def test_report_includes_failed_and_missing_claims() -> None:
    results = sampled_results({"timeline": SAMPLES["timeline"]})
    results.outcomes["sharing"] = Outcome(1.0, "", failure="LoadError: <no> decode was seen")
    results.outcomes["transformers"] = Outcome(0.0, "", missing="transformers is not installed")
    page = render_page(results, CLAIMS)
    assert "LoadError: &lt;no&gt; decode was seen" in page
    assert "transformers is not installed" in page
    words = {claim.name: results.verdict(claim).word for claim in CLAIMS}
    assert (words["timeline"], words["sharing"]) == (Word.REPRODUCED, Word.FAILED)
    assert words["transformers"] is words["batching"] is Word.NOT_MEASURED
    assert page.count("<section") == len(CLAIMS)
    assert "The measurement failed: LoadError" in render_evidence(results, CLAIMS, Path("a"), Path("a"))


def test_report_of_a_smoke_run_has_a_warning() -> None:
    results = replace(sampled_results({"timeline": SAMPLES["timeline"]}), is_quick=True)
    assert "Its verdicts mean nothing" in render_page(results, CLAIMS)
    assert "Its verdicts mean nothing" in render_evidence(results, CLAIMS, Path(), Path())


# --- the run --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def core_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the results of all claims that need no services, on a small scale."""
    output = tmp_path_factory.mktemp("claims")
    run = ClaimsRun("models/tiny", CORE_ONLY, True, output=output, evidence=output / "evidence.md")
    assert measure(run, quiet())
    return output


def test_core_only_claims_are_measured_and_written(core_only: Path) -> None:
    results = load(core_only / "results.json")
    assert set(results.outcomes) == set(CORE_ONLY)
    words = {claim.name: results.verdict(claim).word for claim in CLAIMS if claim.name in CORE_ONLY}
    assert words["timeline"] is words["kv-arithmetic"] is words["waste-by-length"] is Word.REPRODUCED
    assert {path.suffix for path in core_only.iterdir()} == {".html", ".json", ".md", ".png"}


@pytest.mark.timeout(600)
def test_a_claim_is_measured_on_services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts services for each kind of memory that the verdict names."""
    memories = ("contiguous", "contiguous-exact", "paged")
    monkeypatch.setattr(fixed_pool, "MEMORY_NAMES", memories)
    flags = {"num_threads": 1}
    run = ClaimsRun("models/tiny", ("fixed-pool",), True, output=tmp_path, evidence=tmp_path / "e.md", flags=flags)
    assert measure(run, quiet())
    found = load(tmp_path / "results.json").outcomes["fixed-pool"].data
    assert found is not None
    assert [row["memory"] for row in found["rows"]] == list(memories)
    assert {row["num_equal_outputs"] for row in found["rows"]} == {found["num_requests"]}
    assert "fixed-pool" in (tmp_path / "e.md").read_text()


def test_shares_of_waste_add_up_to_one(core_only: Path) -> None:
    outcome = load(core_only / "results.json").outcomes["waste-by-kind"]
    assert outcome.data is not None
    rows = {(row["memory"], row["num_requests"]): row for row in outcome.data["rows"]}
    assert all(sum(row["shares"].values()) == pytest.approx(1.0) for row in rows.values())
    used = {memory: rows[memory, 16]["shares"]["used"] for memory, number in rows if number == 16}
    assert used["paged"] > used["contiguous-exact"] > used["contiguous-power-of-two"] > used["contiguous"]
    assert rows["paged", 16]["shares"]["external"] == 0.0
    assert rows["contiguous", 16]["max_running"] == 1500 // 128


def test_same_seed_gives_the_same_figures(core_only: Path) -> None:
    outcomes = load(core_only / "results.json").outcomes
    for claim in (claim for claim in CLAIMS if claim.name in CORE_ONLY):
        again = asyncio.run(claim.measure(Setting("models/tiny", is_quick=True), Silent()))
        assert json.loads(json.dumps(again)) == outcomes[claim.name].data


def test_report_can_be_rewritten_without_measuring(core_only: Path, tmp_path: Path) -> None:
    rewrite(core_only / "results.json", tmp_path, tmp_path / "evidence.md", quiet())
    assert (tmp_path / "report.html").read_text() == (core_only / "report.html").read_text()
    assert (tmp_path / "evidence.md").read_text() == (core_only / "evidence.md").read_text()


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out all plots, for tests of a run: drawing them takes longer than measuring."""
    monkeypatch.setattr(command, "CLAIMS", tuple(replace(claim, plots=lambda data: []) for claim in CLAIMS))


@pytest.mark.usefixtures("undrawn")
def test_only_keeps_earlier_results_of_the_same_kind(tmp_path: Path) -> None:
    sampled = sampled_results({"sharing": SAMPLES["sharing"]})
    earlier = replace(sampled, machine=describe_machine(None) | {"date": "long ago"}, is_quick=True)
    run = ClaimsRun("models/tiny", ("timeline",), True, output=tmp_path, evidence=tmp_path / "evidence.md")
    earlier.save(tmp_path)
    measure(run, quiet())
    assert set(load(tmp_path / "results.json").outcomes) == {"sharing", "timeline"}
    measure(replace(run, seed=8), quiet())
    assert set(load(tmp_path / "results.json").outcomes) == {"timeline"}


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("machine", "flags"),
    [({"device": "another"}, {}), ({"versions": {"torch": "1"}}, {}), ({}, {"dtype": "bfloat16"})],
)
def test_only_drops_earlier_results_of_other_machines_and_flags(
    tmp_path: Path, machine: dict[str, Any], flags: dict[str, Any]
) -> None:
    """They would be shown as results of this machine. The console says that they are dropped."""
    sampled = sampled_results({"sharing": SAMPLES["sharing"]})
    replace(sampled, machine=describe_machine(None) | machine, is_quick=True, flags=flags).save(tmp_path)
    console = quiet()
    measure(ClaimsRun("models/tiny", ("timeline",), True, output=tmp_path, evidence=tmp_path / "evidence.md"), console)
    assert set(load(tmp_path / "results.json").outcomes) == {"timeline"}
    assert isinstance(console.file, io.StringIO)
    assert "not kept" in console.file.getvalue()


@pytest.mark.usefixtures("undrawn")
def test_the_flags_of_the_services_are_kept_with_the_results(tmp_path: Path) -> None:
    flags = {"dtype": "bfloat16"}
    measure(
        ClaimsRun("models/tiny", ("timeline",), True, output=tmp_path, evidence=tmp_path / "evidence.md", flags=flags),
        quiet(),
    )
    assert load(tmp_path / "results.json").flags == flags
    assert "--dtype bfloat16" in (tmp_path / "evidence.md").read_text()


class Silent:
    def expect(self, num_steps: int) -> None: ...

    def step(self, text: str) -> None: ...


def injected(name: str, error: BaseException | None = None, values: Data | None = None) -> Claim:
    async def measure_injected(setting: Setting, watch: Watch) -> Data:
        watch.expect(1)
        watch.step("the step")
        if error is not None:
            raise error
        return values or {}

    return replace(timeline.CLAIM, name=name, measure=measure_injected)


def test_failing_claim_does_not_affect_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claims = (
        injected("broken", ValueError("out of luck")),
        injected("uninstalled", ModuleNotFoundError("…", name="transformers")),
        injected("unreadable", values={"modes": "none"}),
        injected("sound", values=SAMPLES["timeline"]),
    )
    monkeypatch.setattr(command, "CLAIMS", claims)
    run = ClaimsRun("models/tiny", is_quick=True, output=tmp_path, evidence=tmp_path / "evidence.md")
    assert not measure(run, quiet())
    results = load(tmp_path / "results.json")
    words = {claim.name: results.verdict(claim).word for claim in claims}
    assert words == {
        "broken": Word.FAILED,
        "uninstalled": Word.NOT_MEASURED,
        "unreadable": Word.FAILED,
        "sound": Word.REPRODUCED,
    }
    assert "ValueError: out of luck" in results.verdict(claims[0]).reason
    assert "transformers is not installed" in results.verdict(claims[1]).reason


def test_interrupted_run_keeps_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claims = (
        injected("sound", values=SAMPLES["timeline"]),
        injected("interrupted", KeyboardInterrupt()),
        injected("never", values=SAMPLES["timeline"]),
    )
    monkeypatch.setattr(command, "CLAIMS", claims)
    run = ClaimsRun("models/tiny", is_quick=True, output=tmp_path, evidence=tmp_path / "evidence.md")
    with pytest.raises(KeyboardInterrupt):
        measure(run, quiet())
    results = load(tmp_path / "results.json")
    assert [results.verdict(claim).word for claim in claims] == [Word.REPRODUCED, Word.NOT_MEASURED, Word.NOT_MEASURED]
    assert (tmp_path / "evidence.md").exists()


def test_claim_can_be_measured_without_progress_bars() -> None:
    values = asyncio.run(timeline.CLAIM.measure(Setting("model", is_quick=True), Silent()))
    assert {mode["batching"] for mode in values["modes"]} == {"static", "dynamic", "continuous"}


async def test_progress_bars_show_claims_and_steps() -> None:
    out = io.StringIO()
    console = Console(file=out, width=160, force_terminal=True)
    claim = injected("sound", values=SAMPLES["timeline"])
    with ProgressBars(console, 1) as bars:
        await measure_all([claim], Setting("model"), sampled_results({}), bars, lambda: None)
    assert "reproduced" in out.getvalue()
    assert "1/1" in out.getvalue()


def test_usage_errors_have_clear_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BenchError, match="no such claim: teleport; there are waste-by-kind"):
        measure(ClaimsRun("models/tiny", ("teleport",), output=tmp_path), quiet())
    other = tmp_path / "other.json"
    other.write_text('{"cases": []}')
    with pytest.raises(ResultsError, match=r"not a results\.json"):
        load(other)
    answered = CliRunner().invoke(app, ["bench", "claims", "--from", str(other), "--output", str(tmp_path / "o")])
    assert answered.exit_code == 1
    assert "not a results.json" in answered.stderr
    sampled_results({"timeline": {"modes": [{}]}}).save(tmp_path)
    with pytest.raises(BenchError, match="another version"):
        rewrite(tmp_path / "results.json", tmp_path, tmp_path / "evidence.md", quiet())
    for name in list(sys.modules):
        if name.startswith("bench.claims"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    answered = CliRunner().invoke(app, ["bench", "claims", "--from", str(other)])
    assert answered.exit_code == 1
    assert "quire[" in answered.stderr
