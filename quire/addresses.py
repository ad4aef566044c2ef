"""Addresses of services, "host:port" or "unix:path": parses them, and checks that a server can listen there."""

import errno
import os
import socket
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from itertools import count
from stat import S_ISDIR, S_ISSOCK

UNIX = "unix:"
FILE = "file:"  # an address that stands in a file, because it changes

# Free ports are chosen below the range that systems use for outgoing connections, which could take a port between its
# choice and its use. Each process begins with a range of its own, so that two processes started together choose
# different ports. A fleet of 128 replicas needs some 400.
_FIRST_PORT, _NUM_PORTS, _NUM_PORTS_PER_PROCESS, _MAX_CANDIDATES = 20_000, 12_000, 16, 1024
_num_choices = count()

_MAX_SOCKET_PATH = 107
_NOT_IN_TARGETS = frozenset("%,?#")
"""Characters of a path that gRPC takes for syntax of a URI: it would call another path."""


class AddressError(ValueError):
    """The text is not an address."""


class AddressInUse(Exception):
    """Another server listens there. The message names the address."""


class AddressUnusable(Exception):
    """No server can listen there: the host is not this machine, or the port needs more privileges."""


@dataclass(frozen=True, slots=True)
class HostPort:
    """A TCP address; an IPv6 host is written in brackets."""

    host: str
    port: int

    @classmethod
    def parse(cls, address: str) -> "HostPort":
        """Parses "host:port" or "[host]:port". Raises AddressError."""
        host, colon, port = address.rpartition(":")
        # gRPC takes an IPv6 host without brackets for another address, of which the port is a part.
        is_bare = host.count(":") > 1 and "[" not in host and "/" not in host
        if is_bare or host.count("[") != host.count("]"):
            raise AddressError(f"{address!r} is not an address: an IPv6 host needs brackets, [host]:port")
        if not (host and colon and port.isascii() and port.isdigit() and int(port) < 1 << 16):
            raise AddressError(f"{address!r} is not an address: expected host:port")
        return cls(host.removeprefix("[").removesuffix("]"), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def is_address(text: str) -> bool:
    """Returns whether the text is "unix:path", "host:port" or "[host]:port", on one line."""
    if not text.isprintable():
        return False
    if text.startswith(UNIX):
        return len(text) > len(UNIX)
    try:
        HostPort.parse(text)
    except AddressError:
        return False
    return True


def with_port(address: str, reserved: Collection[str] = ()) -> str:
    """Returns the address with a free port in place of port 0. Checks that a server can listen at any other address.

    Raises AddressError, AddressInUse and AddressUnusable. Another process may take the port before the server listens,
    so the server still has to check.

    reserved  addresses that are not chosen, because servers will listen there
    """
    if not address.startswith(UNIX) and HostPort.parse(address).port == 0:
        for port in _candidate_ports():
            candidate = at_port(address, port)
            with suppress(AddressInUse):
                if candidate not in reserved:
                    return check_free(candidate)
    return check_free(address)


def at_port(address: str, port: int) -> str:
    """Returns the address with another port. A path has no port and stays unchanged."""
    return address if address.startswith(UNIX) else str(HostPort(HostPort.parse(address).host, port))


def is_local(address: str) -> bool:
    """Returns whether only this machine can reach a server at the address: a path, or a loopback address."""
    if address.startswith(UNIX):
        return True
    host = HostPort.parse(address).host
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # another name, which can stand for any address
        return False


def default_admin_address(address: str) -> str:
    """Returns the admin address of a scheduler whose gRPC address has this port or this path.

    It is a Unix socket in a directory of the user, so that a client of the same user on the same machine finds it.
    """
    if address.startswith(UNIX):
        return f"{address}.admin"
    return private_socket(f"admin-{HostPort.parse(address).port}")


def check_free(address: str) -> str:
    """Listens there for a moment and returns the address, with a port chosen by the system in place of port 0.

    A gRPC server does not say why it could not listen, and it replaces the socket file of a running server. So every
    service calls this first. Raises AddressError, AddressInUse and AddressUnusable.
    """
    try:
        if address.startswith(UNIX):
            _check_socket_file(address.removeprefix(UNIX))
            return address
        with _listening(HostPort.parse(address)) as port:
            return at_port(address, port)
    except OSError as error:
        raise listen_error(address, error) from None
    except UnicodeError:  # of a name that cannot be written for the name service, such as "a..b"
        raise AddressUnusable(f"cannot listen on {address}: this cannot be the name of a host") from None


def check_apart(addresses: Mapping[str, str]) -> None:
    """Checks that servers can listen at all of these addresses at once, each of which is free; keys are their settings.

    An address of any host is not apart from one with a host and the same port. Raises AddressUnusable.
    """
    paths: set[str] = set()
    with ExitStack() as listening:
        for setting, address in addresses.items():
            is_taken = address in paths
            if address.startswith(UNIX):
                paths.add(address)
            else:
                try:
                    listening.enter_context(_listening(HostPort.parse(address)))
                except OSError as error:
                    is_taken = error.errno == errno.EADDRINUSE
                    if not is_taken:
                        raise listen_error(address, error) from None
            if is_taken:
                raise AddressUnusable(f"{setting}: two services cannot listen on {address}")


def listen_error(address: str, error: OSError) -> AddressInUse | AddressUnusable:
    """Returns the exception for a failure to listen there."""
    kind = AddressInUse if error.errno == errno.EADDRINUSE else AddressUnusable
    return kind(f"cannot listen on {address}: {error.strerror or error}")


def _candidate_ports() -> Iterator[int]:
    """Yields the ports of this process's range, starting at a different one in each call, and then those above it."""
    start = os.getpid() * _NUM_PORTS_PER_PROCESS
    for _ in range(_NUM_PORTS_PER_PROCESS):
        yield _FIRST_PORT + (start + next(_num_choices) % _NUM_PORTS_PER_PROCESS) % _NUM_PORTS
    for distance in range(_NUM_PORTS_PER_PROCESS, _MAX_CANDIDATES):
        yield _FIRST_PORT + (start + distance) % _NUM_PORTS


@contextmanager
def _listening(wanted: HostPort) -> Iterator[int]:
    """Listens, and yields the port. Raises OSError."""
    family, kind, protocol, _, place = socket.getaddrinfo(wanted.host, wanted.port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        # Servers set this option too: closed connections of an earlier process must not block the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(place)
        probe.listen(1)
        yield probe.getsockname()[1]


def _check_socket_file(path: str) -> None:
    """Raises OSError if a server answers, if no client could call one, or if a file of another kind is there. A socket
    left behind by an earlier server is free.
    """
    is_long = len(os.fsencode(path)) > _MAX_SOCKET_PATH
    if is_long or not _NOT_IN_TARGETS.isdisjoint(path):
        bound = f"a socket's path has at most {_MAX_SOCKET_PATH} bytes"
        why = bound if is_long else f"gRPC cannot call a path with one of {' '.join(sorted(_NOT_IN_TARGETS))}"
        is_private = path.startswith(private_socket("").removeprefix(UNIX).removesuffix(".sock"))
        raise OSError(f"{why}; set TMPDIR to another directory than {_temporary_directory()}" if is_private else why)
    with suppress(FileNotFoundError):
        if not S_ISSOCK(os.stat(path).st_mode):
            raise OSError("what is there is no socket")
    with socket.socket(socket.AF_UNIX) as probe:
        if probe.connect_ex(path) == 0:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def private_socket(name: str) -> str:
    """Returns the address of a socket file of this name in the user's private directory, which need not exist yet."""
    return f"{UNIX}{_temporary_directory()}/quire-{os.getuid()}/{name}.sock"


def _temporary_directory() -> str:
    """Returns the directory of temporary files, also while it is full.

    `tempfile.gettempdir` would then return another one, and a process that starts later would not find the files.
    """
    given = (os.environ.get(name, "") for name in ("TMPDIR", "TEMP", "TMP"))
    return next((os.path.abspath(each) for each in given if os.path.isdir(each) and os.access(each, os.W_OK)), "/tmp")


@contextmanager
def private_files(address: str) -> Iterator[None]:
    """Within the context, the process can make the socket file of an address, which only this user can then use.

    The file mode creation mask keeps others out from the first moment: a later chmod would leave a gap. A missing
    directory is made with mode 0700. Raises AddressUnusable if the directory of `private_socket` belongs to another
    user, or others may write to it.
    """
    if not address.startswith(UNIX):
        yield
        return
    directory = os.path.dirname(os.path.abspath(address.removeprefix(UNIX)))
    previous = os.umask(0o177)
    try:
        _make_private(directory, address)
        yield
    finally:
        os.umask(previous)


def _make_private(directory: str, address: str) -> None:
    """Makes the directory if it is missing. Checks an existing directory only at the default path."""
    try:
        if not os.path.isdir(directory):
            os.umask(0o077)
            os.makedirs(directory, exist_ok=True)
            os.umask(0o177)
        found = os.stat(directory, follow_symlinks=False)
    except OSError as error:
        raise listen_error(address, error) from None
    is_default = directory == os.path.dirname(private_socket("").removeprefix(UNIX))
    if is_default and (found.st_uid != os.getuid() or found.st_mode & 0o077 or not S_ISDIR(found.st_mode)):
        raise AddressUnusable(f"cannot listen on {address}: {directory} is not this user's alone (mode 0700)")
