"""The backend for one machine: every part is a process that outlives the controller."""

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from fleet.backend import BackendError
from fleet.hosted_part import HostedPart
from fleet.parts import Part, PartStatus
from fleet.settings import FleetSettings
from quire.addresses import AddressError, AddressInUse, AddressUnusable


class LocalBackend:
    """Keeps the parts in folders of `directory`, and finds those there that an earlier controller has started."""

    def __init__(self, settings: FleetSettings, directory: Path) -> None:
        """Raises BackendError where there is no /proc, or if the files of a part cannot be read."""
        if not sys.platform.startswith("linux"):
            raise BackendError("the backend `local` needs Linux: it recognizes processes by /proc")
        self._settings = settings
        self._directory = directory
        self._reserved: set[str] = set()
        self._hosted: dict[Part, HostedPart] = {}
        self._probes = ThreadPoolExecutor(16, "probe")
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            for folder in sorted(directory.iterdir()):
                self._host(Part.parse(folder.name))
        except (ValueError, OSError) as error:
            raise BackendError(str(error)) from None

    def start(self, part: Part, peers: Sequence[str]) -> None:
        with _failing(part):
            self._host(part).start(peers)

    def watch(self) -> list[PartStatus]:
        # A part that hangs lets its probe wait, and must not delay the others.
        statuses = self._probes.map(HostedPart.status, list(self._hosted.values()))
        return [status for status in statuses if status is not None]

    def address(self, part: Part, incarnation: str, peers: Sequence[str]) -> None:
        if self._runs(part, incarnation):
            with _failing(part):
                self._hosted[part].tell(peers)

    def drain(self, part: Part, incarnation: str, *, moves_streams: bool) -> None:
        if self._runs(part, incarnation):
            with _failing(part):
                self._hosted[part].drain(breaks_off=moves_streams)

    def kill(self, part: Part, incarnation: str) -> None:
        if self._runs(part, incarnation):
            with _failing(part):
                self._hosted[part].kill()

    def log_tail(self, part: Part) -> str:
        return self._hosted[part].log_tail() if part in self._hosted else ""

    def _runs(self, part: Part, incarnation: str) -> bool:
        hosted = self._hosted.get(part)
        return hosted is not None and hosted.incarnation == incarnation

    def _host(self, part: Part) -> HostedPart:
        if part not in self._hosted:
            folder = self._directory / str(part)
            self._hosted[part] = HostedPart(
                self._settings, part, folder, None, dies_with_parent=False, reserved=self._reserved
            )
        return self._hosted[part]


@contextmanager
def _failing(part: Part) -> Iterator[None]:
    """Turns an error of the system or of an address into a BackendError that names the part."""
    try:
        yield
    except (AddressError, AddressInUse, AddressUnusable, OSError) as error:
        raise BackendError(f"{part}: {error}") from None
