"""One part on the machine where it runs: its command line, its processes and its state."""

import os
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fleet.parts import Part, PartStatus, Role, State
from fleet.probes import Liveness, LoadProbe
from fleet.processes import PartProcesses, Record
from fleet.settings import FleetSettings
from quire.addresses import UNIX, AddressInUse, AddressUnusable, HostPort, with_port
from quire.command import API_KEY, quire_command


class HostedPart:
    """Runs at most one incarnation at a time.

    folder            of the files of the part
    host              at which other machines reach this one; None: all parts are on this machine, and meet at socket
                      files, which need neither keys nor TLS
    dies_with_parent  the processes end with the thread that starts them
    reserved          addresses that parts of this machine were given, perhaps before they listen there; they are added
    """

    def __init__(
        self,
        settings: FleetSettings,
        part: Part,
        folder: Path,
        host: str | None,
        *,
        dies_with_parent: bool,
        reserved: set[str] | None = None,
    ) -> None:
        """Finds the incarnation that an earlier controller has started, by the files of the folder. Raises OSError."""
        self.part = part
        self._settings = settings
        self._folder = folder
        self._host = host
        self._dies_with_parent = dies_with_parent
        self._reserved = set() if reserved is None else reserved
        self._processes = PartProcesses(folder)
        self._liveness = Liveness(part.role)
        self._load_probe: LoadProbe | None = None

    @property
    def incarnation(self) -> str:
        """The last incarnation; empty if there was none."""
        return "" if self._processes.record is None else self._processes.record.incarnation

    def start(self, peers: Sequence[str]) -> None:
        """Starts a new incarnation. Raises AddressInUse and AddressUnusable."""
        self._folder.mkdir(parents=True, exist_ok=True)
        address, http, flags = self._addresses()
        command = (*quire_command(), str(self.part.role), *self._settings.flags(self.part.role), *flags)
        environment = dict(os.environ)
        if self._host is None:  # the gateway calls schedulers at socket files
            environment.pop(API_KEY, None)
        record = Record(
            incarnation=uuid.uuid4().hex,
            command=command,
            address=address,
            http=http,
            peers=tuple(peers),
            started_s=time.time(),
        )
        self._liveness = Liveness(self.part.role)
        self._processes.start(record, environment=environment, dies_with_parent=self._dies_with_parent)

    def status(self) -> PartStatus | None:
        """Returns the state of the last incarnation; None if there was none. Takes a few seconds at most.

        Also keeps the log from filling the disk.
        """
        record = self._processes.record
        if record is None:
            return None
        self._processes.shorten_log()
        state, load = self._state(record.http), None
        record = self._processes.record or record
        if self.part.role is Role.SCHEDULER and state is State.READY:
            self._load_probe = self._load_probe or LoadProbe(self._socket("gateway"))
            load = self._load_probe.load()
        return PartStatus(
            part=self.part,
            incarnation=record.incarnation,
            state=state,
            started_s=record.started_s,
            address=record.address,
            http=record.http,
            peers=record.peers,
            is_draining=record.is_draining,
            exit_code=record.exit_code,
            pid=record.pid or None,
            machine=self._host or "this machine",
            load=load,
        )

    def tell(self, peers: Sequence[str]) -> None:
        self._processes.tell(peers)

    def drain(self, *, breaks_off: bool) -> None:
        self._processes.drain(breaks_off=breaks_off)

    def kill(self) -> None:
        self._processes.kill()

    def until_gone(self, timeout_s: float) -> None:
        """Waits until no process is left, but not longer than this."""
        until_s = time.monotonic() + timeout_s
        while self._processes.is_running and time.monotonic() < until_s:
            time.sleep(0.05)

    def log_tail(self) -> str:
        """Returns the end of the log of the last incarnation."""
        return self._processes.tail()

    def _state(self, http: str) -> State:
        if not self._processes.is_running:
            return State.ENDED
        if not self._processes.has_said_ready:
            return State.STARTING
        record = self._processes.record
        if self.part.role is Role.GATEWAY and record is not None and record.is_draining:
            return State.READY  # it does not listen any more, and the time for its drain bounds it
        return State.HUNG if self._liveness.is_hung(http) else State.READY

    def _addresses(self) -> tuple[str, str, tuple[str, ...]]:
        """Returns the address for clients, that for probes, and the flags that name all addresses.

        An incarnation gets the addresses of the one before it, if they are free.
        """
        last = self._processes.record
        http = self._free_port("127.0.0.1", last.http if last is not None else "")
        peers_file = str(self._processes.peers_file)
        match self.part.role:
            case Role.EXECUTOR:
                address = self._address("executor", last)
                return address, http, ("--listen-address", address, "--metrics-address", http)
            case Role.SCHEDULER:
                listen = self._free_port(self._host or "127.0.0.1", last.address if last is not None else "")
                local = self._socket("gateway")
                listens = ("--listen", listen, "--http-listen", http, "--admin-listen", self._socket("admin"))
                flags = (*listens, "--local-listen", local, "--executor", f"file:{peers_file}")
                return local if self._host is None else listen, http, flags
            case Role.GATEWAY:
                listen = self._gateway_address(last)
                return listen, listen, ("--listen", listen, "--schedulers-file", peers_file)

    def _address(self, name: str, last: Record | None) -> str:
        if self._host is None:
            return self._socket(name)
        return self._free_port(self._host, last.address if last is not None else "")

    def _gateway_address(self, last: Record | None) -> str:
        address = gateway_address(self._settings.gateway_listen, self._host or "127.0.0.1", self.part.index)
        return last.address if last is not None and HostPort.parse(address).port == 0 else with_port(address)

    def _socket(self, name: str) -> str:
        return f"{UNIX}{self._folder}/{name}.sock"

    def _free_port(self, host: str, last: str) -> str:
        """Returns the last address if it is at this host and free, and otherwise one with a free port."""
        if last and not last.startswith(UNIX) and HostPort.parse(last).host == host:
            with suppress(AddressInUse, AddressUnusable):
                return with_port(last)
        address = with_port(str(HostPort(host, 0)), self._reserved)
        self._reserved.add(address)
        return address


def gateway_address(listen: str, host: str, index: int) -> str:
    """Returns the address of a gateway: `listen`, at `host` if it names none, at the port after those of the others.

    A port of 0 stands for any free port.
    """
    named, _, port = listen.rpartition(":")
    named = named or str(HostPort(host, 0)).rpartition(":")[0]
    return f"{named}:{int(port) + index if int(port) else 0}"
