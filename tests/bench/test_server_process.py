"""Servers as processes: ready lines, failures, restarts, and no process is left behind."""

import asyncio
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from bench import server_process
from bench.server_process import ServerFailed, as_flags, child_process, quire_server, until_idle
from quire.async_client import AsyncClient
from tests.support.paths import ROOT

SMALL = ("--num-blocks", "64", "--num-threads", "1", "--max-num-seqs", "4")


def module(directory: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Writes a module that `python -m` finds."""
    (directory / "scripted_server.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", f"{directory}{os.pathsep}{ROOT}")
    return "scripted_server"


def test_values_become_flags() -> None:
    assert as_flags({"num_blocks": 512, "on": True, "prefix_cache": False}) == [
        "--num-blocks", "512", "--on", "--no-prefix-cache",
    ]  # fmt: skip


async def test_child_is_ready_at_its_line_and_ended_with_the_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import sys, time\nprint('hello'); print('ready grpc=a:1 http=b:2', flush=True); time.sleep(600)"
    async with child_process(module(tmp_path, text, monkeypatch)) as child:
        assert child.addresses == {"grpc": "a:1", "http": "b:2"}
        assert psutil.pid_exists(child.pid)
    assert not psutil.pid_exists(child.pid)


async def test_a_server_is_idle_when_it_has_stopped_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of processor times falls when a process ends, whatever the others do."""
    sums_s = [10.0, 14.0, 4.0, 4.9, 4.9]
    monkeypatch.setattr(server_process, "_LOOK_S", 0.01)
    monkeypatch.setattr(server_process, "_processor_s", lambda pids: sums_s.pop(0))
    assert await until_idle([1])
    assert sums_s == []
    always_busy = itertools.count()
    monkeypatch.setattr(server_process, "_processor_s", lambda pids: next(always_busy))
    assert not await until_idle([1], max_wait_s=0.05)


def test_processor_time_is_that_of_a_process_and_its_children() -> None:
    own_s = sum(psutil.Process().cpu_times()[:2])
    busy = "import time\nwhile time.process_time() < 1: pass\nprint('done', flush=True)\ntime.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert server_process._processor_s([os.getpid()]) > own_s + 0.9
        child.kill()


async def test_child_that_ends_before_it_is_ready_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = module(tmp_path, "import sys\nprint('no memory', file=sys.stderr)\nsys.exit(3)", monkeypatch)
    log: list[str] = []
    with pytest.raises(ServerFailed, match="no memory") as failed:
        async with child_process(name, log=log.append):
            pass
    assert failed.value.exit_code == 3
    assert log == ["no memory"]


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_child_dies_with_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = module(tmp_path, "import time\nprint('ready', flush=True); time.sleep(600)", monkeypatch)
    program = (
        "import asyncio, time\n"
        "from bench.server_process import child_process\n"
        "async def run():\n"
        f"    async with child_process({name!r}, ready='ready') as child:\n"
        "        print(child.pid, flush=True)\n"
        "        time.sleep(600)\n"
        "asyncio.run(run())"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    deadline_s = time.monotonic() + 20
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


async def kill_a_service(flags: tuple[str, ...]) -> None:
    """Uses a server, then kills its first service and waits until that is gone."""
    async with quire_server(flags) as server:
        assert server.addresses.keys() == {"grpc", "http", "executor", "metrics"}
        async with AsyncClient(server.addresses["grpc"]) as client:
            assert (await client.server_info()).max_num_seqs == 4
        services = psutil.Process(server.pid).children()
        assert len(services) == 2
        services[0].kill()
        await asyncio.to_thread(services[0].wait, 20)


@pytest.mark.timeout(300)
async def test_restarted_service_invalidates_the_measurement() -> None:
    with pytest.raises(ServerFailed, match="restarted"):
        await kill_a_service(SMALL)
