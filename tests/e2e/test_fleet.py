"""`quire fleet` on this machine: real processes are killed and scaled under streams, and every text is compared."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from typing import TYPE_CHECKING

import psutil
import pytest

from quire.cli import exit_codes
from tests.support.e2e.fleet import Fleet, answers, quire
from tests.support.e2e.process import is_running
from tests.support.e2e.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_STREAMS = int(os.environ.get("NUM_STREAMS", "4"))
NUM_TOKENS = 1000


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """Two replicas and a gateway. Every test leaves them ready."""
    with Fleet() as fleet:
        line = fleet.up(2)
        assert line == f"ready openai={fleet.openai} replicas=2\n"
        yield fleet


@pytest.fixture(scope="module")
def undisturbed(fleet: Fleet) -> list[str]:
    """The texts without faults."""
    return asyncio.run(answers(fleet, NUM_STREAMS, NUM_TOKENS)).texts


async def running(fleet: Fleet, num_streams: int) -> None:
    """Waits until so many requests run or wait in the fleet."""

    async def are_there() -> bool:
        parts = await asyncio.to_thread(fleet.parts)
        return sum(part["num_requests"] or 0 for part in parts.values()) >= num_streams

    await until(are_there, "all requests have come")


async def under_load(fleet: Fleet, expected: list[str], *command: str) -> None:
    """Runs a command of `quire fleet` while streams are open, and compares the texts of all of them."""
    is_done = asyncio.Event()

    async def load() -> None:
        while not is_done.is_set():
            found = await answers(fleet, NUM_STREAMS, NUM_TOKENS)
            assert found.texts == expected
            print(f"{command}: longest silence {found.longest_silence_s:.2f} s in {NUM_STREAMS} streams")

    loading = asyncio.create_task(load())
    await running(fleet, 1)
    await asyncio.to_thread(fleet.run, *command)
    is_done.set()
    await loading


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "part",
    [
        "executor-0",
        pytest.param("scheduler-1", marks=pytest.mark.exhaustive),
        pytest.param("gateway-0", marks=pytest.mark.exhaustive),
        pytest.param("controller", marks=pytest.mark.exhaustive),
    ],
)
async def test_streams_survive_the_death_of_each_part(fleet: Fleet, undisturbed: list[str], part: str) -> None:
    before = fleet.parts()
    streaming = asyncio.create_task(answers(fleet, NUM_STREAMS, NUM_TOKENS))
    await running(fleet, 1)
    killed = await asyncio.to_thread(fleet.kill, part)
    found = await streaming
    assert found.texts == undisturbed
    print(f"{part}: longest silence {found.longest_silence_s:.2f} s in {NUM_STREAMS} streams")
    await fleet.settled(2)
    assert not is_running(killed)
    after = fleet.parts()
    replaced = {name for name in after if after[name]["pid"] != before[name]["pid"]}
    assert replaced == ({part} if part in before else set()), "one death takes no other part with it"


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
async def test_a_fleet_is_scaled_up_and_down_under_load(fleet: Fleet, undisturbed: list[str]) -> None:
    await asyncio.to_thread(fleet.run, "scale", "--replicas", "1")
    assert set(fleet.parts()) == {"executor-0", "scheduler-0", "gateway-0"}
    await under_load(fleet, undisturbed, "scale", "--replicas", "3")
    assert len(fleet.parts()) == 7
    await under_load(fleet, undisturbed, "scale", "--replicas", "1")
    assert set(fleet.parts()) == {"executor-0", "scheduler-0", "gateway-0"}
    await asyncio.to_thread(fleet.run, "scale", "--replicas", "2")


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
async def test_a_drained_replica_gives_its_streams_away(fleet: Fleet, undisturbed: list[str]) -> None:
    before = fleet.parts()
    await under_load(fleet, undisturbed, "drain", "0")
    assert set(fleet.parts()) == {"executor-1", "scheduler-1", "gateway-0"}
    assert not any(is_running(before[name]["pid"]) for name in ("executor-0", "scheduler-0"))
    refused = fleet.run("drain", "1", check=False)
    assert (refused.returncode, "last one" in refused.stderr) == (1, True)
    await asyncio.to_thread(fleet.run, "scale", "--replicas", "2")
    assert fleet.parts()["executor-1"]["pid"] == before["executor-1"]["pid"]


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
async def test_commands_start_a_controller_whose_keeper_has_died_too(fleet: Fleet) -> None:
    before = fleet.parts()
    controller = fleet.status()["controller_pid"]
    keeper = psutil.Process(controller).ppid()
    for pid in (keeper, controller):
        os.kill(pid, signal.SIGKILL)
    await fleet.settled(2)  # the new controller has looked at all parts
    after = fleet.parts()
    assert {name: part["pid"] for name, part in after.items()} == {name: part["pid"] for name, part in before.items()}


def test_a_second_fleet_of_the_same_name_is_refused(fleet: Fleet) -> None:
    done = fleet.run("up", check=False)
    assert done.returncode == exit_codes.FAILED
    assert "is up" in done.stderr


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_down_leaves_nothing() -> None:
    with Fleet() as fleet:
        fleet.up(1)
        pids = [part["pid"] for part in fleet.parts().values()]
        assert all(map(is_running, pids))
        fleet.run("down", "--timeout-s", "30")
        assert not any(map(is_running, pids))
        assert not fleet.directory.exists()
        assert "no fleet" in fleet.run("status", check=False).stderr


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
async def test_a_fleet_grows_with_its_queue() -> None:
    """One slot for eight streams: the queue is as old as the first stream, far above the target."""
    with Fleet() as fleet:
        flags = ("--target-ttft-ms", "50", "--max-replicas", "2", "--executor-flags", "--max-num-seqs 1")
        await asyncio.to_thread(fleet.up, 1, *flags)
        expected = (await answers(fleet, NUM_STREAMS, 100)).texts
        has_grown = asyncio.Event()

        async def load() -> None:
            while not has_grown.is_set():
                await answers(fleet, NUM_STREAMS, NUM_TOKENS)

        async def is_larger() -> bool:
            return len((await asyncio.to_thread(fleet.status))["wanted"]["serving"]) == 2

        loading = asyncio.create_task(load())
        await until(is_larger, "a replica is added")
        await fleet.settled(2)
        has_grown.set()
        await loading
        assert (await answers(fleet, NUM_STREAMS, 100)).texts == expected


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--scheduler-flags", "--policy best"], "--scheduler-flags: policy"),
        (["--backend", "slurm"], "backend"),
    ],
)
def test_wrong_flags_start_nothing(flags: list[str], problem: str) -> None:
    """Others are checked without a process, in tests/quire/cli/test_fleet.py."""
    done = quire("fleet", "up", "--name", "wrong", *flags)
    assert done.returncode == exit_codes.USAGE, done.stderr
    assert re.search(problem, done.stderr), done.stderr
