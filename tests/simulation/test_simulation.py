"""The shell keeps its promises in simulated worlds, a seed replays exactly, and faults that are put back are found."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.simulation.__main__ import MAX_SEEDS, seeds_to_find, violations
from tests.simulation.put_back import FAULTS
from tests.simulation.world import simulate

SEVERAL = 8


@pytest.mark.parametrize("part", range(SEVERAL))
def test_no_world_breaks_a_rule(part: int) -> None:
    assert violations(range(part, 300, SEVERAL)) == {}


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(SEVERAL))
def test_no_world_of_thousands_breaks_a_rule(part: int) -> None:
    assert violations(range(300 + part, 3000, SEVERAL)) == {}


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
    worlds = [simulate(seed) for seed in range(60)]
    lines = [line for world in worlds for line in world.lines]
    for what in ("plan ", "fault: ", "killed", "hangs", "breaks", "rival", "executor lost", "ends: OK", "CANCELLED"):
        assert any(what in line for line in lines), what
    assert len({tuple(world.lines) for world in worlds}) == len(worlds)


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if FAULTS[fault] <= 100], ids=lambda fault: fault.__name__)
def test_a_fault_that_is_put_back_is_found(fault: Callable[[pytest.MonkeyPatch], None]) -> None:
    assert seeds_to_find(fault, FAULTS[fault])


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if FAULTS[fault] > 100], ids=lambda fault: fault.__name__)
def test_a_rare_fault_that_is_put_back_is_found(fault: Callable[[pytest.MonkeyPatch], None]) -> None:
    assert FAULTS[fault] <= MAX_SEEDS
    assert seeds_to_find(fault, FAULTS[fault])
