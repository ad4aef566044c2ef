"""The connection settings that both clients share."""

from dataclasses import dataclass
from typing import Any

DEFAULT_ADDRESS = "127.0.0.1:50051"

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    # A block map takes a few bytes for each block; the default of 4 MiB would allow about half a million blocks.
    ("grpc.max_receive_message_length", 64 << 20),
    # Reconnects soon after a server has started; the defaults are 1 s and 120 s.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 5000),
    # Despite its name, this limits one connection attempt. A server on a busy machine may answer late; where there is
    # no server, the attempt fails at once.
    ("grpc.min_reconnect_backoff_ms", 10_000),
    # Ends streams with UNAVAILABLE within half a minute if the server is stopped or unreachable. A server of Quire
    # permits a ping every ten seconds; gRPC itself would stop pinging after two pings without data.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)


@dataclass(frozen=True, slots=True)
class CallDefaults:
    """The defaults of calls that do not set these values themselves.

    timeout_s       deadline in seconds from now; None: no deadline
    wait_for_ready  True: wait for a server that cannot be reached yet; False: fail at once
    """

    timeout_s: float | None
    wait_for_ready: bool

    def arguments(self, timeout_s: float | None, wait_for_ready: bool | None = None) -> dict[str, Any]:
        """Returns the keyword arguments for the method of a stub, of `grpc` and `grpc.aio` alike."""
        return {
            "timeout": self.timeout_s if timeout_s is None else timeout_s,
            "wait_for_ready": self.wait_for_ready if wait_for_ready is None else wait_for_ready,
        }
