"""The signal that wakes the engine's loop."""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from scheduler.core import InvariantViolation

if TYPE_CHECKING:
    from collections.abc import Iterator


class LoopSignal:
    """An event that can carry an error: an invariant violation found outside the loop, which the loop has to handle."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._error: InvariantViolation | None = None

    @property
    def is_set(self) -> bool:
        return self._event.is_set()

    def set(self) -> None:
        self._event.set()

    @contextmanager
    def defer_invariant_errors(self) -> Iterator[None]:
        """Catches an InvariantViolation, which the caller cannot handle, and wakes the loop, which raises it."""
        try:
            yield
        except InvariantViolation as error:
            self._error = error
            self._event.set()

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
