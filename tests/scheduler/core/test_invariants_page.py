"""Checks that docs/invariants.md and the code agree on the numbers and the state diagram.

`pytest tests/scheduler/core --regenerate` draws the diagram again.
"""

import re
from collections.abc import Iterator

import pytest

from scheduler.core import TRANSITIONS, Sequence, State
from tests.support.core.simulation import simulate
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "invariants.md"
DIAGRAM = re.compile(r"```mermaid\n(.*?)```", re.DOTALL)


def draw_states() -> str:
    """Returns TRANSITIONS as a mermaid state diagram; its labels may contain neither ':' nor ';'."""
    return "".join(f"{line}\n" for line in _diagram_lines())


def _diagram_lines() -> Iterator[str]:
    yield "stateDiagram-v2"
    yield "    [*] --> WAITING: added"
    yield "    [*] --> RUNNING: forked from a running one"
    for source, targets in TRANSITIONS.items():
        for target, occasion in targets.items():
            label = occasion.replace(":", " \N{EN DASH}").replace(";", ",")
            yield f"    {source.name} --> {target.name}: {label}"
    for state in State:
        if not TRANSITIONS[state]:
            yield f"    {state.name} --> [*]"


def test_the_state_diagram_equals_the_table(regenerate: bool) -> None:
    page = PAGE.read_text()
    if regenerate:
        page = DIAGRAM.sub(lambda _: f"```mermaid\n{draw_states()}```", page)
        PAGE.write_text(page)
    assert DIAGRAM.findall(page) == [draw_states()]


def test_every_change_of_state_in_the_table_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other change of state happens, because `become` would refuse it."""
    seen: set[tuple[State, State]] = set()
    become = Sequence.become

    def record(sequence: Sequence, state: State) -> None:
        seen.add((sequence.state, state))
        become(sequence, state)

    monkeypatch.setattr(Sequence, "become", record)
    for seed in range(400):
        simulate(seed)
    assert {(source, target) for source, targets in TRANSITIONS.items() for target in targets} == seen


def test_the_numbers_run_from_one() -> None:
    numbers = [int(number) for number in re.findall(r"^\*\*I(\d+) ·", PAGE.read_text(), re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))


def test_every_number_cited_is_on_the_page() -> None:
    on_page = set(re.findall(r"^\*\*(I\d+) ·", PAGE.read_text(), re.MULTILINE))
    sources = [
        *(ROOT / "scheduler").rglob("*.py"),
        *(ROOT / "tests" / "scheduler").rglob("*.py"),
        *(ROOT / "tests" / "support").rglob("*.py"),
    ]
    cited = {number for source in sources for number in re.findall(r"\bI\d+\b", source.read_text())}
    assert cited <= on_page
    assert {f"I{number}" for number in range(1, 11)} <= cited
