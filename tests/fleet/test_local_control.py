"""The socket of the controller on one machine: its mode, and its answers to commands and to anything else."""

import json
import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet import local_control
from fleet.client import LocalClient
from fleet.controller import Controller
from fleet.local_control import MAX_COMMAND_BYTES, ask
from fleet.settings import FleetSettings
from fleet.wanted import FleetError, NoController, Wanted
from tests.support.fleet.world import FakeBackend


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """The directory of a controller that answers."""
    (tmp_path / "settings.json").write_text(json.dumps(FleetSettings("test", "local", "model").as_json()))
    controller = Controller(FleetSettings("test", "local", "model"), Wanted.of(2), FakeBackend(), lambda wanted: None)
    controller.tick(0.0)
    with local_control._server(tmp_path / "control.sock", controller) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield tmp_path
        server.shutdown()


def test_a_command_is_carried_out(directory: Path) -> None:
    assert ask(directory, "scale", {"replicas": 3}, 5.0)["wanted"]["serving"] == [0, 1, 2]
    assert ask(directory, "status", {}, 5.0)["wanted"]["serving"] == [0, 1, 2]


def test_only_this_user_can_open_the_socket(directory: Path) -> None:
    mode = os.stat(directory / "control.sock").st_mode
    assert stat.S_ISSOCK(mode)
    assert not mode & (stat.S_IRWXG | stat.S_IRWXO)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\n",
        b"{}\n",
        b"[]\n",
        b"null\n",
        b"\xff\xfe\n",
        b'{"verb": "scale", "arguments": {}}\n',
        b'{"verb": "scale", "arguments": {"replicas": "many"}}\n',
        b'{"verb": "scale", "arguments": {"replicas": null}}\n',
        b'{"verb": "scale", "arguments": 7}\n',
        b'{"verb": "run", "arguments": {}}\n',
        b'{"verb": "down", "arguments": {"timeout_s": "soon"}}\n',
        b"[" * 4000 + b"\n",
        b"x" * (2 * MAX_COMMAND_BYTES) + b"\n",
    ],
)
def test_anything_else_is_answered_with_an_error_and_changes_nothing(directory: Path, sent: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(30)
        connection.connect(str(directory / "control.sock"))
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as answer:
            assert "error" in json.loads(answer.readline())
    report = ask(directory, "status", {}, 5.0)
    assert report["wanted"] == Wanted.of(2).as_json()


def test_a_client_that_says_nothing_holds_up_no_other(directory: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(directory / "control.sock"))
        assert ask(directory, "status", {}, 5.0)["name"] == "test"


def test_a_refusal_is_an_error_of_the_command(directory: Path) -> None:
    with pytest.raises(FleetError, match="1 to 128"):
        ask(directory, "scale", {"replicas": 0}, 5.0)


def test_a_missing_controller_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NoController, match=str(tmp_path)):
        ask(tmp_path, "status", {}, 60.0)


@pytest.mark.parametrize("text", ["", "[]", '{"name": "x"}', '{"name": "x", "backend": "moon", "model": "m"}'])
def test_damaged_settings_are_an_error_that_names_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "settings.json").write_text(text)
    with pytest.raises(FleetError, match=r"settings\.json"):
        local_control._read_settings(tmp_path)


def test_a_fleet_with_other_flags_is_not_taken_over(tmp_path: Path) -> None:
    old, new = FleetSettings("test", "local", "model"), FleetSettings("test", "local", "another")
    (tmp_path / "settings.json").write_text(json.dumps(old.as_json()))
    with pytest.raises(FleetError, match="other flags"):
        local_control.launch(tmp_path, new, Wanted.of(1))


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [("{", "{}"), ("[]", "{}"), (None, "null"), (None, "[]"), (None, '{"serving": [0], "draining": null}')],
)
def test_a_controller_with_damaged_files_ends_and_is_not_started_again(
    tmp_path: Path, settings: str | None, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2 says to the process that keeps it that another start would not help."""
    monkeypatch.setattr(local_control.logs, "configure", lambda *_: None)
    valid = json.dumps(FleetSettings("test", "local", "model").as_json())
    (tmp_path / "settings.json").write_text(valid if settings is None else settings)
    (tmp_path / "wanted.json").write_text(wanted)
    assert local_control.run(tmp_path) == 2
    assert local_control.keep(tmp_path) == 0


def test_an_up_that_dies_between_its_files_leaves_no_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, settings = tmp_path / "fleet", FleetSettings("test", "local", "model")
    write, started = local_control.write_atomically, []
    monkeypatch.setattr(local_control, "relaunch", started.append)

    def dies(path: Path, text: str) -> None:
        write(path, text)
        raise KeyboardInterrupt

    monkeypatch.setattr(local_control, "write_atomically", dies)
    with pytest.raises(KeyboardInterrupt):
        local_control.launch(directory, settings, Wanted.of(2))
    monkeypatch.setattr(local_control, "write_atomically", write)
    with pytest.raises(FleetError, match="there is no fleet"):
        LocalClient(directory).ask("down", {})
    assert local_control.launch(directory, settings, Wanted.of(1)) is True
    assert started == [directory]
