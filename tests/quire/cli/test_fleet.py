"""`quire fleet` waits for its parts: with a controller over a fake backend."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from fleet.controller import Controller, clock_ahead_s
from fleet.parts import Part, Role
from fleet.settings import FleetSettings
from fleet.wanted import Wanted
from quire.cli import exit_codes
from quire.cli import fleet as cli
from quire.cli.main import app
from quire.logs import as_json_line
from tests.support.fleet.world import FakeBackend


class Client:
    """Compares once before each answer."""

    def __init__(self, replicas: int, **fields: Any) -> None:
        self.backend = FakeBackend()
        settings = FleetSettings("test", "local", "model", **fields)
        self.controller = Controller(settings, Wanted.of(replicas), self.backend, lambda _: None, self.now_s)
        self.fatal: Part | None = None
        self.exit_code = exit_codes.USAGE

    def now_s(self) -> float:
        return self.backend.now_s

    def ask(self, verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
        self.backend.now_s += 0.5
        self.controller.tick()
        for each in self.backend.running(self.fatal) if self.fatal else []:
            self.backend.end(each.incarnation, self.exit_code)
            self.controller.tick()
        return self.controller.call(verb, arguments)


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.time, "sleep", lambda seconds: None)


@pytest.mark.parametrize("is_new", [True, False])
def test_a_part_that_cannot_start_ends_a_new_fleet_only(is_new: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """A fleet that serves goes on when one more replica does not fit into the memory of its machine."""
    client = Client(1)
    cli._until_ready(client, 60.0, is_new=False)  # type: ignore[arg-type]
    client.ask("scale", {"replicas": 2})
    client.fatal = Part(Role.EXECUTOR, 1)
    with pytest.raises(typer.Exit) as ended:
        cli._until_ready(client, 60.0, is_new=is_new)  # type: ignore[arg-type]
    assert ended.value.exit_code == exit_codes.USAGE
    assert "executor-1 cannot be started" in capsys.readouterr().err
    report = client.ask("status", {})
    assert (report["wanted"]["down_by_s"] is not None) is is_new
    if not is_new:
        assert {"executor-0", "scheduler-0", "gateway-0"} <= set(client.backend.parts())


def test_an_interrupted_up_says_that_the_fleet_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "fleet_client", lambda *_: SimpleNamespace(up=lambda *_: True, ask=ask))
    result = CliRunner().invoke(app, ["fleet", "up", "--name", "other", "--gateway-listen", "127.0.0.1:0"])
    assert result.exit_code == exit_codes.INTERRUPTED
    assert result.stderr == "quire: the fleet other goes on in the background: see quire fleet down\n"


def test_the_reason_of_a_part_that_logs_as_json_is_shown_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    client = Client(1)
    client.fatal, client.backend.last_line = Part(Role.EXECUTOR, 0), as_json_line("executor", "no model", "critical")
    with pytest.raises(typer.Exit):
        cli._until_ready(client, 60.0, is_new=True)  # type: ignore[arg-type]
    assert "executor-0 cannot be started: no model\n" in capsys.readouterr().err


def test_gateways_that_share_an_address_end_a_new_fleet(capsys: pytest.CaptureFixture[str]) -> None:
    """Their flags can name one, as in --gateway-flags "--grpc-listen 127.0.0.1:50051"."""
    client = Client(1)
    client.fatal, client.exit_code = Part(Role.GATEWAY, 0), exit_codes.ADDRESS_IN_USE
    with pytest.raises(typer.Exit) as ended:
        cli._until_ready(client, 60.0, is_new=True)  # type: ignore[arg-type]
    assert ended.value.exit_code == exit_codes.ADDRESS_IN_USE
    assert "gateway-0 cannot be started: the last line" in capsys.readouterr().err
    report = client.ask("status", {})
    assert report["wanted"]["down_by_s"] is not None
    assert client.backend.verbs("start").count("gateway-0") == 3


def test_an_address_in_use_after_other_ends_is_no_reason_to_give_up() -> None:
    """A process of the part before may still hold it."""
    client = Client(1)
    client.fatal = Part(Role.GATEWAY, 0)

    def ask(verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
        num_starts = client.backend.verbs("start").count("gateway-0")
        client.exit_code = 1 if num_starts < 4 else exit_codes.ADDRESS_IN_USE
        client.fatal = client.fatal if num_starts < 6 else None
        return client.ask(verb, arguments)

    report = cli._until_ready(SimpleNamespace(ask=ask), 60.0, is_new=True)  # type: ignore[arg-type]
    assert {each["part"]: each["num_ends"] for each in report["parts"]}["gateway-0"] == 6


@pytest.mark.parametrize(
    ("words", "expected_s"), [([], 300.0), (["--timeout-s", "150"], 150.0), (["--timeout-s", "0"], 0.0)]
)
def test_a_replica_is_drained_for_the_time_of_its_fleet_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, words: list[str], expected_s: float
) -> None:
    client = Client(2, drain_timeout_s=300.0)
    cli._until_ready(client, 60.0, is_new=True)  # type: ignore[arg-type]
    draining: list[float] = []

    def ask(verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
        report = client.controller.call(verb, arguments)
        draining.extend(by_s - clock_ahead_s() - client.now_s() for by_s in report["wanted"]["draining"].values())
        return report

    monkeypatch.setattr(cli, "fleet_client", lambda *_: SimpleNamespace(ask=ask))
    CliRunner().invoke(cli.app, ["drain", "1", "--wait-s", "0", *words])
    assert draining[0] == pytest.approx(expected_s, abs=1.0)


def test_progress_counts_no_part_that_drains(capsys: pytest.CaptureFixture[str]) -> None:
    client = Client(3)
    cli._until_ready(client, 60.0, is_new=True)  # type: ignore[arg-type]
    capsys.readouterr()
    client.ask("drain", {"replica": 0, "timeout_s": 300.0})
    cli._until_ready(client, 60.0, is_new=False)  # type: ignore[arg-type]
    lines = capsys.readouterr().err.splitlines()
    assert "5 of 5 parts are ready, replica 0 is draining" in lines
    assert all(line.startswith("5 of 5 parts are ready") for line in lines), lines


def test_a_fleet_that_scales_itself_while_it_starts_is_ready_with_the_number_it_wants() -> None:
    client = Client(1, target_ttft_ms=500.0, min_replicas=2, max_replicas=4)
    report = cli._until_ready(client, 60.0, is_new=True)  # type: ignore[arg-type]
    assert report["wanted"]["serving"] == [0, 1]


@pytest.mark.parametrize("name", ["a" * 300, "../x", ""])
def test_a_name_that_no_fleet_can_have_is_refused(name: str) -> None:
    result = CliRunner().invoke(cli.app, ["status", "--name", name])
    assert result.exit_code == exit_codes.USAGE
    assert "name must have at most 40" in result.output


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--scheduler-flags", "--no-such-flag 1"], "--scheduler-flags: .*--no-such-flag"),
        (["--executor-flags", "--dtype int4"], "--executor-flags: dtype"),
        (["--executor-flags", "'unbalanced"], "--executor-flags"),
        (
            ["--executor-flags", "--listen-address 0.0.0.0:1"],
            "--executor-flags: the fleet itself sets --listen-address",
        ),
        (["--gateway-flags", "--scheduler a:1"], "--gateway-flags: the fleet itself sets --scheduler"),
        (["--gateway-flags", "--help"], "--gateway-flags"),
        (["--model", "/nowhere"], "/nowhere"),
        (["--name", "../up"], "name"),
        (["--gateway-listen", "8000"], "gateway_listen"),
        (["--min-replicas", "2"], "target_ttft_ms"),
        (["--target-ttft-ms", "500", "--min-replicas", "3", "--max-replicas", "2"], "min_replicas"),
        (["--replicas", "1000"], "128"),
    ],
)
def test_wrong_flags_start_nothing(flags: list[str], problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "fleet_client", lambda *_: pytest.fail("a fleet was started"))
    result = CliRunner().invoke(app, ["fleet", "up", "--name", "wrong", *flags])
    assert result.exit_code == exit_codes.USAGE, result.stderr
    assert re.search(problem, result.stderr), result.stderr
