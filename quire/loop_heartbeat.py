"""Tells other threads when an event loop last ran. Liveness probes of the scheduler and the executor ask for it."""

import asyncio
import time

BEAT_INTERVAL_S = 0.5


class LoopHeartbeat:
    """Measures when an event loop last ran. `start` it in the loop; read `silent_s` in any thread."""

    def __init__(self) -> None:
        self._beat_s = time.monotonic()
        self._next: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._beat_s = time.monotonic()
        self._next = asyncio.get_running_loop().call_later(BEAT_INTERVAL_S, self.start)

    def stop(self) -> None:
        if self._next is not None:
            self._next.cancel()

    def silent_s(self) -> float:
        """Returns the seconds since the last heartbeat."""
        return time.monotonic() - self._beat_s


def liveness(silent_s: float, stuck_after_s: float) -> tuple[str, str]:
    """Returns the HTTP status and the text of /healthz for an event loop that has not run for `silent_s`."""
    if silent_s > stuck_after_s:
        return "503 Service Unavailable", f"stuck: the event loop has not run for {silent_s:.0f} s\n"
    return "200 OK", "ok\n"
