"""Counts the engine's unexpected errors, and decides when it must give up."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)

MAX_FAILURES = 5
WINDOW_S = 10.0
FIRST_PAUSE_S = 0.05


class Failures:
    """The unexpected errors of one engine.

    Each failure ends all requests. MAX_FAILURES of them within WINDOW_S, without a committed step in between, mean that
    a new core does not help.
    """

    def __init__(self) -> None:
        self.num_failures = 0
        """Number of all failures so far."""
        self._recent_s: list[float] = []
        self._logged_at_s: float | None = None
        self._num_unlogged = 0

    async def outlast(
        self,
        serve: Callable[[], Awaitable[None]],
        begin_anew: Callable[[float], Awaitable[None]],
        last_step: Callable[[], object],
    ) -> None:
        """Calls `serve` again after each failure. Raises the last error if the engine must give up.

        begin_anew  called before, with the seconds to wait: four times as long after each failure in a row
        last_step   returns the last committed step, or None
        """
        before = last_step()
        while True:
            try:
                if self._recent_s:
                    await begin_anew(FIRST_PAUSE_S * 4.0 ** (len(self._recent_s) - 1))
                await serve()
            except Exception as error:
                step = last_step()
                if not self.add(error, time.monotonic(), has_committed=step is not before):
                    raise
                before = step

    def add(self, error: Exception, now_s: float, *, has_committed: bool) -> bool:
        """Records and logs a failure. Returns False if the engine must give up.

        has_committed  a step has been committed since the failure before
        """
        self.num_failures += 1
        recent_s = [] if has_committed else self._recent_s
        self._recent_s = [*(time_s for time_s in recent_s if now_s - time_s < WINDOW_S), now_s]
        self._log(error, now_s)
        return len(self._recent_s) < MAX_FAILURES

    def _log(self, error: Exception, now_s: float) -> None:
        """Logs at most one failure in WINDOW_S, because there can be many each second."""
        if self._logged_at_s is not None and now_s - self._logged_at_s < WINDOW_S:
            self._num_unlogged += 1
            return
        others = f", after {self._num_unlogged} more that were not logged" if self._num_unlogged else ""
        self._logged_at_s, self._num_unlogged = now_s, 0
        problem = f"the engine failed{others}: {type(error).__name__}: {error}"
        log.critical("%s; all requests fail, and a new core replaces the old one", problem, exc_info=error)
