"""The state of the server, which readiness, health checks and metrics report."""

from __future__ import annotations

import logging
from enum import Enum
from typing import TYPE_CHECKING

from quire.unexpected import unexpected
from scheduler.core import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable


log = logging.getLogger(__name__)


class ServerState(Enum):
    WAITING_FOR_EXECUTOR = "waiting for executor"
    SERVING = "serving"
    DRAINING = "draining"


class Readiness:
    """Holds the state, and calls back when it changes.

    trouble  why no executor can be used, if an operator has to act; empty otherwise
    """

    def __init__(self) -> None:
        self.state = ServerState.WAITING_FOR_EXECUTOR
        self.trouble = ""
        self.is_draining = False
        self._is_final = False
        self._is_attached = False
        self._callbacks: list[Callable[[ServerState], None]] = []

    def __str__(self) -> str:
        return f"{self.state.value}: {self.trouble}" if self.trouble else self.state.value

    def on_change(self, callback: Callable[[ServerState], None]) -> None:
        self._callbacks.append(callback)

    def drain(self, *, is_final: bool = False) -> None:
        """Starts draining; the state stays DRAINING until `resume`."""
        self.is_draining = True
        self._is_final |= is_final
        self._become(ServerState.DRAINING)

    def resume(self) -> None:
        """Ends draining. Raises Unavailable if the process is about to end."""
        if self._is_final:
            raise Unavailable("the process is about to end")
        self.is_draining = False
        self._report()

    def check_open(self) -> None:
        """Raises Unavailable while the server drains."""
        if self.is_draining:
            raise Unavailable("the server is draining")

    def update(self, *, is_attached: bool, trouble: str = "") -> None:
        """Records that an executor has been attached or lost."""
        self.trouble = trouble
        self._is_attached = is_attached
        self._report()

    def _report(self) -> None:
        if not self.is_draining:
            self._become(ServerState.SERVING if self._is_attached else ServerState.WAITING_FOR_EXECUTOR)

    def _become(self, state: ServerState) -> None:
        if state is not self.state:
            self.state = state
            for callback in self._callbacks:
                try:
                    callback(state)
                except Exception:
                    log.exception("an observer of the server's state failed")
                    unexpected("state_observer")
