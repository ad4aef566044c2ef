"""The socket of the controller on one machine: its mode, and its answers to commands and to anything else."""

import errno
import fcntl
import json
import os
import shutil
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from fleet import local_control
from fleet.client import LocalClient
from fleet.controller import Controller
from fleet.local_control import MAX_COMMAND_BYTES, ask
from fleet.settings import FleetSettings
from fleet.wanted import FleetError, NoController, Wanted
from quire.addresses import AddressInUse, HostPort, with_port
from tests.support.fleet.world import FakeBackend
from tests.support.waiting import wait_until


@pytest.fixture(autouse=True)
def _with_short_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The directories of tests have long ones."""
    monkeypatch.setattr(local_control, "LONGEST_SOCKET", "a.sock")


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """The directory of a controller that answers."""
    (tmp_path / "settings.json").write_text(json.dumps(FleetSettings("test", "local", "model").as_json()))
    controller = Controller(FleetSettings("test", "local", "model"), Wanted.of(2), FakeBackend(), lambda wanted: None)
    controller.tick()
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
    assert report["wanted"] == Wanted.of(2).as_json(0.0)


def test_a_client_that_says_nothing_holds_up_no_other(directory: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(directory / "control.sock"))
        assert ask(directory, "status", {}, 5.0)["name"] == "test"


def test_a_refusal_is_an_error_of_the_command(directory: Path) -> None:
    with pytest.raises(FleetError, match="1 to 128") as refused:
        ask(directory, "scale", {"replicas": 0}, 5.0)
    assert refused.value.exit_code == 2


def test_a_missing_controller_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NoController, match=str(tmp_path)):
        ask(tmp_path, "status", {}, 60.0)


def test_a_controller_that_cannot_run_says_why(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text("{}")
    (tmp_path / "controller.log").write_text("started\nwanted.json is damaged\n")
    with pytest.raises(NoController, match=r"controller\.log ends with: wanted\.json is damaged$"):
        ask(tmp_path, "status", {}, 0.0)


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


def test_of_two_fleets_that_start_at_once_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one would overwrite the flags of the first, whose controller does not answer yet."""
    directory, started = tmp_path / "fleet", []

    def relaunch(directory: Path) -> None:
        started.append((directory / "settings.json").read_text())
        threading.Thread(target=lambda: (time.sleep(0.5), answer()), daemon=True).start()

    def answer() -> None:
        controller = Controller(settings("a"), Wanted.of(1), FakeBackend(), lambda wanted: None)
        controller.tick()
        local_control._server(directory / "control.sock", controller).serve_forever(0.01)

    def settings(model: str) -> FleetSettings:
        return FleetSettings("test", "local", model, gateway_listen="127.0.0.1:0")

    def up(model: str) -> None:
        try:
            results.append(LocalClient(directory).up(settings(model), Wanted.of(1)))
        except FleetError as error:
            results.append(str(error))

    monkeypatch.setattr(local_control, "relaunch", relaunch)
    results: list[bool | str] = []
    commands = [threading.Thread(target=up, args=(model,)) for model in "ab"]
    for command in commands:
        command.start()
    for command in commands:
        command.join(60)
    assert sorted(map(str, results)) == ["True", "the fleet test is up: see quire fleet status, scale and down"]
    assert started == [(directory / "settings.json").read_text()]


def test_a_second_controller_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands start one when the first does not answer in time: they must not gather, and wait for its end."""
    monkeypatch.setattr(local_control.logs, "configure", lambda *_: None)
    (tmp_path / "settings.json").write_text(json.dumps(FleetSettings("test", "local", "model").as_json()))
    with _locked(tmp_path):
        assert local_control.run(tmp_path) == 2


def test_a_controller_without_resources_is_not_taken_for_a_second_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the limit of processes, a start fails with the same error as a lock that another process has."""

    def control(directory: Path) -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(local_control.logs, "configure", lambda *_: None)
    monkeypatch.setattr(local_control, "_control", control)
    with pytest.raises(BlockingIOError):  # so that `keep` starts it again
        local_control.run(tmp_path)


def test_the_files_of_a_fleet_are_kept_while_tmp_is_cleaned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that another process has locked is left out by systemd-tmpfiles, which removes old files."""
    directory, found = tmp_path / "fleet", []

    def clean(controller: Controller) -> None:
        with suppress(BlockingIOError), _locked(directory):
            shutil.rmtree(directory)
        found.append(sorted(path.name for path in directory.iterdir()))

    monkeypatch.setattr(local_control.logs, "configure", lambda *_: None)
    monkeypatch.setattr(local_control, "relaunch", lambda directory: None)
    monkeypatch.setattr(Controller, "run", clean)
    settings = FleetSettings("test", "local", "model", gateway_listen="127.0.0.1:0")
    local_control.launch(directory, settings, Wanted.of(1))
    assert local_control.run(directory) == 0
    assert found == [["control.sock", "parts", "settings.json", "started_in", "wanted.json"]]


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Locks a directory, as each controller and each cleaner of /tmp does. Raises BlockingIOError."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


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
    directory, settings = tmp_path / "fleet", FleetSettings("test", "local", "model", gateway_listen="127.0.0.1:0")
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


def test_a_new_fleet_whose_gateway_could_not_listen_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The port after the one of the flag belongs to the second gateway."""
    monkeypatch.setattr(local_control, "relaunch", lambda directory: pytest.fail("a controller was started"))
    first = HostPort.parse(with_port("127.0.0.1:0"))
    settings = FleetSettings("test", "local", "model", gateway_listen=str(first))
    with socket.create_server((first.host, first.port + 1)):
        with pytest.raises(AddressInUse, match=str(first.port + 1)):
            local_control.launch(tmp_path / "fleet", settings, Wanted.of(1, 2))
    assert not (tmp_path / "fleet").exists()


def test_a_fleet_whose_socket_files_would_have_too_long_names_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its controller could not listen, and would be started again and again."""
    monkeypatch.setattr(local_control, "relaunch", lambda directory: pytest.fail("a controller was started"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    settings = FleetSettings("test", "local", "model", gateway_listen="127.0.0.1:0")
    directory = local_control.fleet_directory("x" * (108 - len(f"{tmp_path}/{local_control.LONGEST_SOCKET}")))
    with pytest.raises(FleetError, match="TMPDIR") as refused:
        local_control.launch(directory, settings, Wanted.of(1))
    assert refused.value.exit_code == 2
    assert not directory.exists()


@pytest.mark.parametrize(("problem", "expected", "exit_code"), [("others", "0700", 2), ("full", "No space left", 1)])
def test_a_fleet_whose_files_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: str, expected: str, exit_code: int
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    directory = local_control.fleet_directory("test")
    directory.parent.mkdir(mode=0o700)
    if problem == "others":
        directory.parent.chmod(0o755)
    else:
        monkeypatch.setattr(local_control, "write_atomically", full)
    settings = FleetSettings("test", "local", "model", gateway_listen="127.0.0.1:0")
    with pytest.raises(FleetError, match=expected) as refused:
        LocalClient(directory).up(settings, Wanted.of(1))
    assert refused.value.exit_code == exit_code


def test_a_fleet_is_not_started_in_a_directory_that_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_control, "relaunch", lambda directory: pytest.fail("a controller was started"))
    removed = tmp_path / "removed"
    removed.mkdir()
    monkeypatch.chdir(removed)
    removed.rmdir()
    settings = FleetSettings("test", "local", "model", gateway_listen="127.0.0.1:0")
    with pytest.raises(FleetError, match="removed"):
        local_control.launch(tmp_path / "fleet", settings, Wanted.of(1))
    assert not (tmp_path / "fleet").exists()


def test_a_controller_works_where_its_fleet_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths in the flags of services are relative to it. If it was removed, the controller runs nevertheless."""
    directory, first, second = tmp_path / "fleet", tmp_path / "first \udcff", tmp_path / "second"
    says_where = (sys.executable, "-c", "import os, sys; sys.stdout.buffer.write(os.getcwdb() + b'\\n')")
    monkeypatch.setattr(local_control, "_command", lambda verb, directory: says_where)

    def said() -> list[str]:
        return [os.fsdecode(line) for line in (directory / "controller.log").read_bytes().splitlines()]

    for each in (first, second):
        each.mkdir()
    monkeypatch.chdir(first)
    settings = FleetSettings("test", "local", "model", gateway_listen="127.0.0.1:0")
    local_control.launch(directory, settings, Wanted.of(1))
    wait_until(lambda: said() == [str(first)])
    monkeypatch.chdir(second)
    local_control.relaunch(directory)
    wait_until(lambda: said() == [str(first)] * 2)
    first.rmdir()
    local_control.relaunch(directory)
    wait_until(lambda: said()[2:] == [str(directory)])
