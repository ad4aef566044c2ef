"""The signal that wakes the engine's loop."""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from scheduler.core import CapacityExceeded, QueueFull, Unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator


class LoopSignal:
    """An event that can carry an error: one that was found outside the loop, and that the loop has to handle."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._error: Exception | None = None

    @property
    def is_set(self) -> bool:
        return self._event.is_set()

    def set(self) -> None:
        self._event.set()

    def fail(self, error: Exception) -> None:
        """Wakes the loop, which raises the error."""
        self._error = error
        self._event.set()

    @contextmanager
    def defer_errors(self) -> Iterator[None]:
        """Catches an unexpected error of the core, which the caller cannot handle, and passes it to the loop."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  (after any error the core may be wrong)
            self.fail(error)

    @contextmanager
    def report_bugs(self) -> Iterator[None]:
        """Passes an unexpected error to the loop, and on to the caller. A refusal of a request is expected."""
        try:
            yield
        except (Unavailable, CapacityExceeded, QueueFull):
            raise
        except Exception as error:
            self.fail(error)
            raise

    def clear(self) -> None:
        """Clears the signal. If there is an error, raises it and keeps it."""
        self._event.clear()
        self.raise_error()

    def raise_error(self) -> None:
        """Raises the error, if there is one. The loop calls this after every wait, before it uses the core."""
        if self._error is not None:
            raise self._error

    def forget_error(self) -> None:
        self._error = None

    async def wait_until(self, due_s: float | None) -> None:
        """Waits until the signal is set. Sets it itself at `due_s` (time.monotonic())."""
        if due_s is None:
            await self._event.wait()
            return
        timer = asyncio.get_running_loop().call_later(max(0.0, due_s - time.monotonic()), self._event.set)
        await self._event.wait()
        timer.cancel()
