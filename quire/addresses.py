"""Addresses of services: "host:port", or "unix:path"."""

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

# Where free ports are looked for: below those that systems hand to outgoing connections, which could take a port
# between its choice and its use. Each process begins in a stretch of its own, so that two started together do not
# meet.
_FIRST_PORT, _NUM_PORTS, _NUM_PORTS_OF_A_PROCESS = 20_000, 12_000, 16
_num_choices = count()


class AddressError(ValueError):
    """What is no address."""


class AddressInUse(Exception):
    """Nothing can listen at an address."""


@dataclass(frozen=True, slots=True)
class HostPort:
    """A TCP address; an IPv6 host is written in brackets."""

    host: str
    port: int

    @classmethod
    def parse(cls, address: str) -> "HostPort":
        """Raises AddressError."""
        host, colon, port = address.rpartition(":")
        if not (host and colon and port.isascii() and port.isdigit() and int(port) < 1 << 16):
            raise AddressError(f"{address!r} is no address: expected host:port")
        return cls(host.removeprefix("[").removesuffix("]"), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def with_port(address: str) -> str:
    """The same address, with a free port in the place of port 0. Others are checked: can something listen there?

    Raises AddressInUse where the port is taken or the host is not this machine's. Between this and the listening
    somebody else may take the port: who listens still has to check.
    """
    if address.startswith("unix:"):
        return address
    wanted = HostPort.parse(address)
    if wanted.port == 0:
        for port in _quiet_ports():
            try:
                return _bindable(HostPort(wanted.host, port))
            except AddressInUse:
                continue
    return _bindable(wanted)


def _quiet_ports() -> Iterator[int]:
    """A stretch's worth of candidates, never beginning with the one chosen last."""
    start = os.getpid() * _NUM_PORTS_OF_A_PROCESS
    for _ in range(_NUM_PORTS_OF_A_PROCESS):
        yield _FIRST_PORT + (start + next(_num_choices) % _NUM_PORTS_OF_A_PROCESS) % _NUM_PORTS


def _bindable(wanted: HostPort) -> str:
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            wanted.host, wanted.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # As servers do: a connection of an earlier process that has yet to time out is no hindrance.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
            probe.listen(1)
            return str(HostPort(wanted.host, probe.getsockname()[1]))
    except OSError as error:
        raise AddressInUse(f"cannot listen on {wanted}: {error.strerror or error}") from None
