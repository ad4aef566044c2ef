"""Addresses of services, "host:port" or "unix:path": what is one, and whether something can listen there."""

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

UNIX = "unix:"

# Where free ports are looked for: below those that systems hand to outgoing connections, which could take a port
# between its choice and its use. Each process begins in a stretch of its own, so that two started together do not
# meet.
_FIRST_PORT, _NUM_PORTS, _NUM_PORTS_OF_A_PROCESS = 20_000, 12_000, 16
_num_choices = count()


class AddressError(ValueError):
    """What is no address."""


class AddressInUse(Exception):
    """Somebody else listens there. The message names the address."""


class AddressUnusable(Exception):
    """Nobody could listen there: the host is not this machine's, or the port not ours to take."""


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

    Raises AddressError, AddressInUse and AddressUnusable. Between this and the listening somebody else may take the
    port: who listens still has to check.
    """
    if address.startswith(UNIX):
        return address
    if HostPort.parse(address).port == 0:
        for port in _quiet_ports():
            with suppress(AddressInUse):
                return check_free(at_port(address, port))
    return check_free(address)


def at_port(address: str, port: int) -> str:
    """The same address with the port that was really taken; a path has none."""
    return address if address.startswith(UNIX) else str(HostPort(HostPort.parse(address).host, port))


def check_free(address: str) -> str:
    """Listens there for a moment, and returns the address: in the place of port 0, with one that the system chose.

    gRPC does not say why it could not listen, and takes the socket file of a living server from under it: who serves
    with it asks here first. Raises AddressError, AddressInUse and AddressUnusable.
    """
    try:
        if address.startswith(UNIX):
            _knock(address.removeprefix(UNIX))
            return address
        return at_port(address, _listen_for_a_moment(HostPort.parse(address)))
    except OSError as error:
        raise listen_error(address, error) from None


def listen_error(address: str, error: OSError) -> AddressInUse | AddressUnusable:
    """What a failure to listen there means."""
    kind = AddressInUse if error.errno == errno.EADDRINUSE else AddressUnusable
    return kind(f"cannot listen on {address}: {error.strerror or error}")


def _quiet_ports() -> Iterator[int]:
    """A stretch's worth of candidates, never beginning with the one chosen last."""
    start = os.getpid() * _NUM_PORTS_OF_A_PROCESS
    for _ in range(_NUM_PORTS_OF_A_PROCESS):
        yield _FIRST_PORT + (start + next(_num_choices) % _NUM_PORTS_OF_A_PROCESS) % _NUM_PORTS


def _listen_for_a_moment(wanted: HostPort) -> int:
    """The port. Raises OSError."""
    family, kind, protocol, _, place = socket.getaddrinfo(wanted.host, wanted.port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        # As servers do: a connection of an earlier process that has yet to time out is no hindrance.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(place)
        probe.listen(1)
        port: int = probe.getsockname()[1]
        return port


def _knock(path: str) -> None:
    """Raises OSError if somebody answers; a socket file that nobody serves any more is free."""
    with socket.socket(socket.AF_UNIX) as probe:
        if probe.connect_ex(path) == 0:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
