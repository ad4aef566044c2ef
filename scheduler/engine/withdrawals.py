"""Waits until the executor has executed the plans that withdraw blocks from its retained prefix cache."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scheduler.core import Scheduler
    from scheduler.core.state import SchedulerState


class Withdrawals:
    """Lets callers wait for withdrawals. The engine calls `check` whenever the core may have made progress."""

    def __init__(self) -> None:
        self._core: Scheduler | None = None
        self._progress = asyncio.Event()

    def check(self, core: Scheduler | None) -> None:
        """Wakes the waiting calls of `executed`; `core` is the engine's present one."""
        self._core = core
        self._progress.set()
        self._progress = asyncio.Event()

    async def executed(self) -> None:
        """Returns when the executor has forgotten all blocks that were withdrawn before this call.

        A scheduler that starts later cannot find them then. Also returns when the executor is lost or the core was
        replaced: this process then lets the next epoch start without any blocks.
        """
        if (core := self._core) is None:
            return
        state = core.state
        epoch, step_id = state.epoch, _last_withdrawal(state)
        while core is self._core and core.is_attached and state.epoch == epoch and _last_committed(state) < step_id:
            await self._progress.wait()


def _last_withdrawal(state: SchedulerState) -> int:
    """Returns the step id of the last plan, in flight or to come, that withdraws blocks; 0: there is none."""
    if state.cache.index.withdrawn:
        return state.step_id + 1
    return max((step.step_id for step in state.in_flight if step.withdraws), default=0)


def _last_committed(state: SchedulerState) -> int:
    """Returns the step id of the last plan of this epoch whose result is committed; 0: there is none."""
    return state.in_flight[0].step_id - 1 if state.in_flight else state.step_id
