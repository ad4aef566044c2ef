"""`quire bench serve --rest-s`: a server that has just been started is left alone before it gets its load."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import bench.command
import bench.serve
import bench.spawned
import quire.cli.main
from bench.load import LoadError
from bench.serve import BenchSettings, Peer, Subject, measure_others
from quire.cli.services import ServicePair


@pytest.fixture
def history(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happened, in order. Nobody really waits, no server is started, and the first load ends the run."""
    happened: list[str] = []

    async def sleep(duration_s: float) -> None:
        happened.append(f"{duration_s:g} s")

    async def measure_quire(settings: BenchSettings, console: Console) -> None:
        happened.append("load")
        raise LoadError("enough")

    async def run_all(name: str, *_: Any) -> list[Any]:
        happened.append(f"load of the {name}")
        return []

    async def beside_services(pair: ServicePair, measure: Callable[[], Coroutine[Any, Any, Any]], _: Console) -> Any:
        happened.append("ready")
        return await measure()

    @asynccontextmanager
    async def peer_process(command: tuple[str, ...], url: str) -> AsyncIterator[int]:
        happened.append("peer ready")
        yield 1

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(bench.command, "measure_quire", measure_quire)
    monkeypatch.setattr(bench.spawned, "beside_services", beside_services)
    monkeypatch.setattr(bench.serve, "_run_all", run_all)
    monkeypatch.setattr(bench.serve, "peer_process", peer_process)
    return happened


def bench_serve(*flags: str) -> None:
    result = CliRunner().invoke(quire.cli.main.app, ["bench", "serve", *flags])
    assert result.stderr.splitlines() == ["quire: enough"]


def test_a_server_that_was_started_rests_between_ready_and_its_load(history: list[str]) -> None:
    bench_serve("--spawn", "--rest-s", "12.5")
    assert history == ["ready", "12.5 s", "load"]


def test_it_rests_though_nobody_says_so(history: list[str]) -> None:
    bench_serve("--spawn")
    assert history == ["ready", "10 s", "load"]


def test_a_server_that_ran_already_is_not_waited_for(history: list[str]) -> None:
    bench_serve("--url", "127.0.0.1:1", "--rest-s", "12.5")
    assert history == ["load"]


@pytest.mark.parametrize(("command", "before"), [(("serve",), ["peer ready", "3 s"]), ((), [])])
async def test_a_peer_that_was_started_rests_as_long(
    history: list[str], command: tuple[str, ...], before: list[str]
) -> None:
    settings = BenchSettings("127.0.0.1:1", (1,), rest_s=3.0, peer=Peer("http://127.0.0.1:1", "m", command))
    subject = Subject(info=None, traces={})  # type: ignore[arg-type]  # nobody looks at it
    await measure_others(settings, subject, Console(quiet=True))
    assert history == [*before, "load of the peer"]
