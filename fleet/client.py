"""The side of a fleet's user: reaches its controller, and starts one."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from fleet import local_control
from fleet.settings import BACKENDS, FleetSettings, check_name
from fleet.wanted import FleetError, NoController, Wanted
from quire.addresses import AddressUnusable

_FIRST_TRY_S = 3.0
_SECOND_TRY_S = 30.0


class FleetClient(Protocol):
    """Reaches the fleet of one name. All methods raise FleetError."""

    def up(self, settings: FleetSettings, wanted: Wanted) -> bool:
        """Starts the controller. Returns whether the fleet is new; otherwise it takes over parts that run."""

    def ask(self, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Lets the controller carry out a command. Returns the status of the fleet."""

    def until_down(self, timeout_s: float) -> None:
        """Returns when nothing is left of the fleet."""


def fleet_client(backend: str, name: str, address: str) -> FleetClient:
    """Returns the client of a fleet. Raises FleetError.

    address  of the Ray cluster
    """
    if backend not in BACKENDS:
        raise FleetError(f"backend must be one of {', '.join(BACKENDS)}, not {backend!r}", exit_code=2)
    try:
        check_name(name)
    except ValueError as error:
        raise FleetError(str(error), exit_code=2) from None
    if backend == "local":
        return LocalClient(local_control.fleet_directory(name))
    try:
        from fleet.ray_client import RayClient
    except ImportError as error:
        raise FleetError(
            f"the backend `ray` needs the extra `fleet`, as in pip install 'quire[fleet]': {error}", exit_code=2
        ) from None
    return RayClient(name, address)


class LocalClient:
    """Reaches the controller at its socket file, and starts it again if it has died with the process that keeps it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def up(self, settings: FleetSettings, wanted: Wanted) -> bool:
        with _failing(), local_control.alone(self._directory):
            is_new = local_control.launch(self._directory, settings, wanted)
            local_control.ask(self._directory, "status", {}, _SECOND_TRY_S)  # from now on, a second `up` finds it
            return is_new

    def ask(self, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return local_control.ask(self._directory, verb, arguments, _FIRST_TRY_S)
        except NoController:
            if not (self._directory / "settings.json").exists():
                raise FleetError(f"there is no fleet in {self._directory}: start one with quire fleet up") from None
            with _failing():
                local_control.relaunch(self._directory)
            return local_control.ask(self._directory, verb, arguments, _SECOND_TRY_S)

    def until_down(self, timeout_s: float) -> None:
        until_s = time.monotonic() + timeout_s
        while self._directory.exists():
            if time.monotonic() >= until_s:
                raise FleetError(f"not down after {timeout_s:g} s: see quire fleet status")
            with suppress(FleetError):
                self.ask("status", {})  # starts a controller that has died
            time.sleep(0.1)


@contextmanager
def _failing() -> Iterator[None]:
    """Turns an error of the system, as on a full disk, into a FleetError."""
    try:
        yield
    except AddressUnusable as error:
        raise FleetError(str(error), exit_code=2) from None
    except OSError as error:
        raise FleetError(f"the controller cannot be started: {error}") from None
