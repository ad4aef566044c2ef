"""Links, file names and functions that the pages refer to exist."""

import json
import re
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def headings(page: Path) -> set[str]:
    """Returns the anchors of a page, as GitHub makes them from its headings, and those written as `<a id=…>`."""
    text = page.read_text(encoding="utf-8")
    titles = re.findall(
        r"^#{1,6} (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE
    )
    anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
    return anchors | set(re.findall(r'<a id="([^"]+)">', text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    missing = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in headings(target)):
            missing.append(link)
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_page_begins_with_its_question(page: Path) -> None:
    if page.name in ("README.md", "evidence.md", "invariants.md"):
        pytest.skip("an introduction, or a page that lists facts")
    title, _, question = page.read_text(encoding="utf-8").split("\n")[:3]
    assert title.startswith("# ")
    assert re.match(r"\*[A-Z].*\?\*", question)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_of_the_tests_that_a_page_names_exists(page: Path) -> None:
    named = set(re.findall(r"\btests/[\w/]+(?:\.\w+)?", page.read_text(encoding="utf-8")))
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("package", ["scheduler", "executor", "gateway", "bench"])
def test_the_readmes_tree_names_each_room(package: str) -> None:
    tree = (ROOT / "README.md").read_text(encoding="utf-8").partition("## The tree")[2]
    entry = re.search(rf"^{package}/ .*\n(?: .*\n)*", tree, re.MULTILINE)
    assert entry is not None
    rooms = {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
    assert sorted(rooms - set(re.findall(r"\w+", entry[0]))) == []


def test_the_glossary_explains_each_word_once() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    words = [word for row in re.findall(r"^\| ([^|]+) \|", text, re.MULTILINE) for word in row.split(", ")]
    assert [word for word in words if words.count(word) > 1 and word != "word"] == []  # the head of each table


def test_the_last_long_run_of_the_simulation_is_the_recorded_one() -> None:
    recorded = json.loads((ROOT / "bench" / "results" / "simulation.json").read_text(encoding="utf-8"))
    counts, found_by = recorded["counts"], recorded["first_seed_that_finds"].values()
    expected = (
        f"{counts['seeds']:,} seeds, {counts['requests']:,} requests, {counts['resumptions']:,} resumptions, "
        f"{counts['scheduler_processes']:,} schedulers, {counts['executor_processes']:,} executors, and no violation; "
        f"each of {len(found_by)} faults that are put back is found by seed {max(found_by):,} or before"
    )
    assert recorded["violations"] == {}
    assert expected in " ".join((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split())


def test_every_hop_of_the_walk_exists() -> None:
    text = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    hops = re.findall(r"^\| (\d+) \| `([^`:]+):(\w+)` \|", text, re.MULTILINE)
    assert [int(number) for number, _, _ in hops] == list(range(1, len(hops) + 1))
    assert 10 <= len(hops) <= 16
    for _, path, function in hops:
        source = (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).exists() else ""
        assert re.search(rf"\bdef {function}\(", source), f"{path}:{function}"
