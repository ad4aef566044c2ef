"""Counts and logs the calls that are refused because of the caller."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from quire.logs import printable
from scheduler.telemetry.limits import LOG_LINES, limited

if TYPE_CHECKING:
    from collections.abc import Callable

LOG_INTERVAL_S = 5.0
"""Refusals are logged at most this often; a line says how many were not logged before it."""

log = logging.getLogger("scheduler.access")


class Refusals:
    """Counts every refusal, and logs some. `count` is called with the reason of each."""

    def __init__(self, count: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._count = count
        self._clock = clock
        self._next_line_s = float("-inf")
        self._num_unlogged = 0

    def refused(self, reason: str, call: str, client: str, why: str) -> None:
        """Called for each refused call. `why` never contains credentials.

        reason  UNAUTHENTICATED, PERMISSION_DENIED or UNAVAILABLE (scheduler.identity.identity)
        call    the gRPC method, or the HTTP method and path
        client  the network address of the caller
        """
        self._count(reason)
        now_s = self._clock()
        if now_s < self._next_line_s:
            self._num_unlogged += 1
            limited(LOG_LINES)
            return
        fields = {"reason": reason, "call": printable(call[:128]), "client": client, "why": why}
        log.warning("call refused", extra=fields | {"not_logged_before": self._num_unlogged})
        self._next_line_s, self._num_unlogged = now_s + LOG_INTERVAL_S, 0
