"""The shell keeps its promises in simulated worlds, a seed replays exactly, and faults that are put back are found."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.simulation.__main__ import MAX_SEEDS, find
from tests.simulation.put_back_streams import FAULTS
from tests.simulation.report import Report, report_of
from tests.simulation.world import simulate

SEVERAL = 8


@pytest.mark.parametrize("part", range(SEVERAL))
def test_no_world_breaks_a_rule(part: int) -> None:
    assert report_of(range(part, 200, SEVERAL)).violations == {}


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(SEVERAL))
def test_no_world_of_thousands_breaks_a_rule(part: int) -> None:
    assert report_of(range(200 + part, 1400, SEVERAL)).violations == {}


def test_a_seed_replays_byte_for_byte() -> None:
    """In another process, with other hashes, and after other seeds."""
    program = (
        "from tests.simulation.world import simulate",
        "logs = {seed: simulate(seed).lines for seed in %s}",
        "print(*(line for seed in range(30, 50) for line in logs[seed]), sep='\\n')",
    )
    logs = [
        subprocess.run(
            [sys.executable, "-c", "\n".join(program) % seeds],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
        ).stdout
        for hash_seed, seeds in (("1", "range(30, 50)"), ("2", "range(52, 20, -1)"))
    ]
    assert logs[0] == logs[1]
    assert len(logs[0].splitlines()) > 400


def test_worlds_differ_and_much_happens_in_them() -> None:
    """The oracles would hold in worlds in which nothing happens."""
    worlds, report = [simulate(seed) for seed in range(60)], Report()
    lines = [line for world in worlds for line in world.lines]
    for what in (
        "plan ",
        "fault: ",
        "executor is killed",
        "scheduler is killed",
        "scheduler is stopped",
        "SIGABRT",
        "hangs",
        "breaks",
        "resumes after",
        "rival",
        "foreign scheduler has published",
        "executor lost",
        "ends: OK",
        "CANCELLED",
    ):
        assert any(what in line for line in lines), what
    for seed, world in enumerate(worlds):
        report.count(seed, world)
    assert all(report.counts[f"requests_with_{kind}"] for kind in ("beams", "logprobs", "chats"))
    assert report.counts["resumptions"] > 10
    assert report.counts["adopted_blocks"] > 100
    assert len({tuple(world.lines) for world in worlds}) == len(worlds)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_that_is_put_back_is_found(fault: Callable[[pytest.MonkeyPatch], None]) -> None:
    """A change of the planner moves what happens under a seed, so the next seeds are searched as well."""
    assert 0 <= FAULTS[fault] < MAX_SEEDS
    assert find(fault, range(FAULTS[fault], FAULTS[fault] + 100))
