"""The connection settings that both clients share."""

import math
from dataclasses import dataclass, replace
from typing import Any

from quire.addresses import UNIX, AddressError, default_admin_address, is_local
from quire.tls import TlsFiles, channel_credentials

DEFAULT_ADDRESS = "127.0.0.1:50051"
_LONGEST_S = 1e8

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    # Each client has a connection of its own. gRPC would share one among all clients of a process, and with it the
    # streams that a server permits on a connection: one tenant's calls would wait for another's.
    ("grpc.use_local_subchannel_pool", 1),
    # A block map takes a few bytes for each block; the default of 4 MiB would allow about half a million blocks.
    ("grpc.max_receive_message_length", 64 << 20),
    # Reconnects soon after a server has started; the defaults are 1 s and 120 s.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Clients try again by themselves, and only where it is safe (`quire.tries`).
    ("grpc.enable_retries", 0),
    # Despite its name, this limits one connection attempt. A server on a busy machine may answer late; where there is
    # no server, the attempt fails at once.
    ("grpc.min_reconnect_backoff_ms", 10_000),
    # Ends streams with UNAVAILABLE within 15 seconds if the server is stopped or unreachable. A server of Quire
    # permits a ping every five seconds; gRPC itself would stop pinging after two pings without data.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
)


@dataclass(frozen=True, slots=True)
class CallDefaults:
    """The arguments of calls that do not set these values themselves.

    timeout_s       deadline in seconds from now; None, or more than three years: no deadline
    wait_for_ready  True: wait for a server that cannot be reached yet; False: fail at once
    api_key         sent with each call; None: nothing is sent
    """

    timeout_s: float | None
    wait_for_ready: bool
    api_key: str | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for a deadline that is no number."""
        _deadline(self.timeout_s)

    def arguments(self, timeout_s: float | None, wait_for_ready: bool | None = None) -> dict[str, Any]:
        """Returns the keyword arguments for the method of a stub, of `grpc` and `grpc.aio` alike. Raises ValueError."""
        return {
            "timeout": _deadline(self.timeout_s if timeout_s is None else timeout_s),
            "wait_for_ready": self.wait_for_ready if wait_for_ready is None else wait_for_ready,
            "metadata": () if self.api_key is None else (("authorization", f"Bearer {self.api_key}"),),
        }


def _deadline(timeout_s: float | None) -> float | None:
    """Returns the timeout for gRPC, whose deadlines overflow beyond 292 years, and are then in the past."""
    if timeout_s is not None and math.isnan(timeout_s):
        raise ValueError("timeout_s must be a number")
    return None if timeout_s is None or timeout_s > _LONGEST_S else timeout_s


@dataclass(frozen=True, slots=True)
class Connection:
    """Says how a client reaches a server; most fields are the parameters of `quire.Client`.

    is_direct  never through a proxy of the environment, also to other machines: services of Quire call each other so
    """

    address: str
    api_key: str | None
    tls: bool | TlsFiles
    ca: str | None
    admin: str | None
    is_direct: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for a key that cannot be sent in a header, which the message does not contain, for an
        address that is empty, a URL or without a port, or for a port above 65535. gRPC would take another port.
        """
        if ":" not in self.address or self.address.startswith(("http:", "https:")):
            given = repr(self.address) if self.address else "empty"
            raise ValueError(f"address must be host:port or unix:path, not {given}")
        for address in (self.address, self.admin or ""):
            port = address.rpartition(":")[2]
            if not address.startswith(UNIX) and port.isascii() and port.isdigit() and int(port) >= 1 << 16:
                raise ValueError(f"address must have a port up to 65535, not {address!r}")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable() and self.api_key):
            raise ValueError("api_key must consist of printable ASCII characters")

    def channel(self, kind: Any) -> Any:
        """Returns a channel to the server, of `kind`: the module `grpc` or `grpc.aio`. Raises TlsError."""
        return self._channel_to(kind, self.address)

    def admin_channel(self, kind: Any) -> Any:
        """Returns a channel to the admin address, or None if that is not known. Raises TlsError."""
        return None if self._admin_address is None else self._channel_to(kind, self._admin_address)

    @property
    def admin_key(self) -> str | None:
        """The key for the admin address. It is not sent to a socket file, which needs none."""
        is_file = self._admin_address is not None and self._admin_address.startswith(UNIX)
        return None if is_file else self.api_key

    @property
    def _admin_address(self) -> str | None:
        if self.admin is not None:
            return self.admin
        return default_admin_address(self.address) if _is_here(self.address) else None

    def _channel_to(self, kind: Any, address: str) -> Any:
        # An http_proxy of the environment reaches other networks. gRPC would send calls to loopback there too.
        is_direct = self.is_direct or _is_here(address)
        options = (*CHANNEL_OPTIONS, ("grpc.enable_http_proxy", 0)) if is_direct else CHANNEL_OPTIONS
        if address.startswith(UNIX) or not (self.tls or self.ca):
            return kind.insecure_channel(address, options=options)
        files = replace(self.tls, ca=self.tls.ca or self.ca) if isinstance(self.tls, TlsFiles) else self.ca
        return kind.secure_channel(address, channel_credentials(files), options=options)


def _is_here(address: str) -> bool:
    try:
        return is_local(address)
    except AddressError:  # another kind of target that gRPC knows
        return False
