"""What both clients agree on about a connection."""

from dataclasses import dataclass
from typing import Any

DEFAULT_ADDRESS = "127.0.0.1:50051"

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    # A block map has a few bytes a block: the default of 4 MiB would end at about half a million blocks.
    ("grpc.max_receive_message_length", 64 << 20),
    # A server that is just starting is found soon; the defaults are 1 s and 120 s.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 5000),
    # In spite of its name this is what one attempt may take. A server on a busy machine takes its time; one that is not
    # there refuses at once.
    ("grpc.min_reconnect_backoff_ms", 10_000),
)


@dataclass(frozen=True, slots=True)
class CallDefaults:
    """What a call takes where it says nothing itself.

    timeout_s       deadline in seconds from now; None: no deadline
    wait_for_ready  True: wait for a server that cannot be reached yet; False: fail at once
    """

    timeout_s: float | None
    wait_for_ready: bool

    def arguments(self, timeout_s: float | None, wait_for_ready: bool | None = None) -> dict[str, Any]:
        """Keyword arguments of a stub's method, `grpc` and `grpc.aio` alike."""
        return {
            "timeout": self.timeout_s if timeout_s is None else timeout_s,
            "wait_for_ready": self.wait_for_ready if wait_for_ready is None else wait_for_ready,
        }
