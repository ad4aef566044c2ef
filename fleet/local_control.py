"""The controller of a fleet on one machine, as a process: its files, its socket, and the process that restarts it.

    DIRECTORY/settings.json, wanted.json   written by `quire fleet up` and by the controller
    DIRECTORY/started_in                   link to the working directory of `quire fleet up`, for paths in its flags
    DIRECTORY/control.sock                 takes one command as a line of JSON on each connection, from this user only
    DIRECTORY/parts                        of the backend
    DIRECTORY/controller.log
    DIRECTORY.lock                         held by a command that starts the fleet, and by a controller that removes it

The controller holds a lock of DIRECTORY itself: there is never a second one.

`python -m fleet.local_control keep DIRECTORY` starts `run` and starts it again when it dies.
"""

import fcntl
import json
import logging
import os
import shutil
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fleet.backend import BackendError
from fleet.controller import Controller, clock_ahead_s
from fleet.hosted_part import gateway_address
from fleet.local import LocalBackend
from fleet.processes import write_atomically
from fleet.settings import FleetSettings
from fleet.wanted import FleetError, NoController, Wanted, status_in
from quire import logs
from quire.addresses import UNIX, AddressError, AddressUnusable, check_free, private_files, private_socket, with_port
from quire.command import interpreter

log = logging.getLogger(__name__)

MAX_COMMAND_BYTES = 4096
RESTART_PAUSE_S = 0.5
LONGEST_SOCKET = "parts/scheduler-999/gateway.sock"
"""Path of a socket file in the directory. No other one is longer."""

_COMMAND_TIMEOUT_S = 10.0


def fleet_directory(name: str) -> Path:
    """Returns the directory of a fleet of this user, which need not exist."""
    return Path(private_socket(f"fleet-{name}").removeprefix(UNIX)).with_suffix("")


def ask(directory: Path, verb: str, arguments: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    """Sends a command to the controller; tries again for `timeout_s` if it is being restarted.

    Raises NoController, and FleetError if the controller refuses the command.
    """
    until_s = time.monotonic() + timeout_s
    while True:
        try:
            answer = _ask_once(directory, {"verb": verb, "arguments": dict(arguments)})
        except (OSError, ValueError) as error:
            if time.monotonic() >= until_s or not (directory / "settings.json").exists():
                raise NoController(f"no controller answers in {directory}: {error}{_last_words(directory)}") from None
            time.sleep(0.2)
            continue
        return status_in(answer)


def _last_words(directory: Path) -> str:
    """Returns the end of the controller's log, which says why it cannot run; empty if there is none."""
    with suppress(OSError):
        lines = (directory / "controller.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"; {directory / 'controller.log'} ends with: {lines[-1]}" if lines else ""
    return ""


def _ask_once(directory: Path, command: Mapping[str, Any]) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_COMMAND_TIMEOUT_S)
        connection.connect(str(directory / "control.sock"))
        connection.sendall(json.dumps(command).encode() + b"\n")
        with connection.makefile("rb") as answer:
            value: dict[str, Any] = json.loads(answer.readline())
            return value


@contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Within the context, no other process starts a fleet in this directory or removes one. Raises AddressUnusable."""
    with private_files(f"{UNIX}{directory}"):  # its parent is this user's alone
        pass
    with open(f"{directory}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def launch(directory: Path, settings: FleetSettings, wanted: Wanted) -> bool:
    """Starts the controller in the background. It outlives this process, and the terminal. To be called `alone`.

    Returns whether the fleet is new; otherwise its parts may have run on without a controller.
    Raises FleetError if there is one, or if parts of a fleet with other settings run; AddressInUse and FleetError if a
    gateway of a new fleet could not listen.
    """
    with suppress(NoController):
        ask(directory, "status", {}, 0.0)
        raise FleetError(f"the fleet {settings.name} is up: see quire fleet status, scale and down")
    previous = _read_settings(directory)
    if previous is not None and previous != settings:
        raise FleetError(
            f"{directory} holds a fleet that was started with other flags and whose controller is gone: give the same "
            "flags to take it over, or end it with quire fleet down"
        )
    if previous is None:
        _check_addresses(directory, settings, wanted)
    try:
        here = os.getcwd()
    except FileNotFoundError:
        raise FleetError("the working directory was removed", exit_code=2) from None
    directory.mkdir(mode=0o700, exist_ok=True)
    (directory / "started_in").unlink(missing_ok=True)
    (directory / "started_in").symlink_to(here)
    # There is a fleet if there are settings, so they are written last and removed first.
    write_atomically(directory / "wanted.json", json.dumps(wanted.as_json(clock_ahead_s())))
    write_atomically(directory / "settings.json", json.dumps(settings.as_json()))
    relaunch(directory)
    return previous is None


def _check_addresses(directory: Path, settings: FleetSettings, wanted: Wanted) -> None:
    """Raises AddressInUse and FleetError."""
    try:
        check_free(f"{UNIX}{directory}/{LONGEST_SOCKET}")
    except AddressUnusable as error:
        raise FleetError(str(error), exit_code=2) from None
    for index in range(wanted.gateways):
        try:
            with_port(gateway_address(settings.gateway_listen, "127.0.0.1", index))
        except (AddressError, AddressUnusable) as error:
            raise FleetError(f"gateway_listen: {error}", exit_code=2) from None


def relaunch(directory: Path) -> None:
    """Starts the controller of a directory that has its settings, in the working directory of `quire fleet up`."""
    started_in = directory / "started_in"
    with open(directory / "controller.log", "ab") as output:
        subprocess.Popen(
            _command("keep", directory),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd=started_in if started_in.is_dir() else directory,  # it may have been removed
        )


def keep(directory: Path) -> int:
    """Runs the controller, and again when it dies, until it ends well."""
    while subprocess.run(_command("run", directory), check=False).returncode not in (0, 2):
        time.sleep(RESTART_PAUSE_S)
    return 0


def run(directory: Path) -> int:
    """Runs the controller until the fleet is down, and then removes the directory. Returns the exit code."""
    logs.configure("fleet", "info", "console")
    try:
        # The lock also keeps systemd-tmpfiles, which cleans /tmp, from removing files here that are ten days old.
        lock = os.open(directory, os.O_RDONLY)
    except FileNotFoundError:
        return 2
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.error("another controller has the fleet, and does not answer in time")
            return 2
        return _control(directory)
    finally:
        os.close(lock)


def _control(directory: Path) -> int:
    try:
        if (settings := _read_settings(directory)) is None:
            return 2
        saved = json.loads((directory / "wanted.json").read_text(encoding="utf-8"))
        wanted = Wanted.from_json(saved, clock_ahead_s())
        backend = LocalBackend(settings, directory / "parts")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, FleetError, BackendError) as error:
        log.critical("the fleet cannot be controlled: %s", error)
        return 2

    def save(wanted: Wanted) -> None:
        write_atomically(directory / "wanted.json", json.dumps(wanted.as_json(clock_ahead_s())))

    controller = Controller(settings, wanted, backend, save)
    with _server(directory / "control.sock", controller) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        controller.run()
        with alone(directory):  # a command that would start a fleet meanwhile is told that there is one
            server.shutdown()
            (directory / "settings.json").unlink(missing_ok=True)
            shutil.rmtree(directory, ignore_errors=True)
    return 0


def _server(path: Path, controller: Controller) -> socketserver.ThreadingUnixStreamServer:
    class Handler(socketserver.StreamRequestHandler):
        timeout = _COMMAND_TIMEOUT_S

        def handle(self) -> None:
            with suppress(OSError):
                self.wfile.write(
                    json.dumps(_answer(controller, self.rfile.readline(MAX_COMMAND_BYTES))).encode() + b"\n"
                )

    class Server(socketserver.ThreadingUnixStreamServer):
        daemon_threads = True

    path.unlink(missing_ok=True)
    with private_files(f"{UNIX}{path}"):
        return Server(str(path), Handler)


def _answer(controller: Controller, line: bytes) -> dict[str, Any]:
    try:
        command = json.loads(line)
        return {"status": controller.call(str(command["verb"]), dict(command["arguments"]))}
    except FleetError as error:
        return error.as_answer()
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        return {"error": f"this is no command: {error!r}"}


def _read_settings(directory: Path) -> FleetSettings | None:
    try:
        return FleetSettings.from_json(json.loads((directory / "settings.json").read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise FleetError(f"{directory / 'settings.json'} cannot be used: {error}") from None


def _command(verb: str, directory: Path) -> tuple[str, ...]:
    return (*interpreter(), "-m", "fleet.local_control", verb, str(directory))


def main(arguments: list[str]) -> int:
    verb, directory = arguments
    return {"keep": keep, "run": run}[verb](Path(directory))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
