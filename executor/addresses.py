"""Is an address free? Asked before minutes are spent on loading a model."""

import socket

from executor.errors import AddressInUse


def check_free(address: str) -> None:
    """address is "host:port" or "unix:/path". Raises AddressInUse if somebody listens there, or we may not."""
    if address.startswith("unix:"):
        _check_free_path(address.removeprefix("unix:"))
    else:
        host, _, port = address.rpartition(":")
        _check_free_port(host.strip("[]"), int(port), address)


def _check_free_port(host: str, port: int, address: str) -> None:
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
    except OSError as error:
        raise AddressInUse(f"cannot listen on {address}: {error.strerror or error}") from None


def _check_free_path(path: str) -> None:
    """A socket file that nobody serves any more is free."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return
    raise AddressInUse(f"cannot listen on unix:{path}: another process does")
