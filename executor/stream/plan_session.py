"""The state of one plan stream: the order of its plans, and outcomes on their way to the scheduler.

All of it runs on the event loop, except for `deliver`, which any thread may call.
"""

import asyncio
import contextlib

from executor.device.work import Failure, FailureKind, Outcome
from executor.errors import EpochRefused
from executor.plans.plan import StepOutput, StepPlan

# Maximum number of plans in flight on one stream. A scheduler keeps two in flight; if it sends more than this, it
# has to wait.
_WINDOW = 16


class PlanSession:
    """One plan stream. Its epoch is that of its lease, and 0 before it has one."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.epoch = 0
        self._next_step_id = 1
        self._loop = loop
        self._outcomes: asyncio.Queue[Outcome] = asyncio.Queue()
        self._window = asyncio.Semaphore(_WINDOW)

    async def room(self) -> None:
        """Waits until another plan may be in flight."""
        await self._window.acquire()

    def check_order(self, plan: StepPlan) -> None:
        """Raises EpochRefused unless this plan follows the last one."""
        if plan.epoch != self.epoch:
            raise EpochRefused(f"epoch {plan.epoch} in a stream of epoch {self.epoch}")
        if plan.step_id != self._next_step_id:
            raise EpochRefused(f"step {plan.step_id} where step {self._next_step_id} was due")
        self._next_step_id += 1

    def deliver(self, outcome: Outcome) -> None:
        """Puts an outcome on the stream. Any thread may call it."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, so there is no receiver left
            self._loop.call_soon_threadsafe(self._outcomes.put_nowait, outcome)

    def fail(self, kind: FailureKind, message: str) -> None:
        """Ends the stream at once, regardless of plans in flight."""
        self._outcomes.put_nowait(Failure(kind, message))

    async def outcome(self) -> Outcome:
        """Returns the next outcome: the retained blocks if the opening asks for them, results in order, then one
        Failure or EndOfPlans."""
        outcome = await self._outcomes.get()
        if isinstance(outcome, StepOutput):
            self._window.release()
        return outcome
