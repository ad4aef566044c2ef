"""One plan stream, from its first plan to its end: order of plans, and outcomes on their way to the scheduler.

Lives on the event loop, except for `deliver`, which any thread may call.
"""

import asyncio
import contextlib

from executor.device.device_thread import EndOfPlans, Failure, FailureKind, Outcome
from executor.errors import EpochRefused
from executor.plans.plan import StepPlan

# Plans that may be out on one stream. A scheduler has two; whoever sends more has to wait.
_WINDOW = 16


class PlanSession:
    """epoch is 0 until the first plan."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.epoch = 0
        self._next_step_id = 1
        self._loop = loop
        self._outcomes: asyncio.Queue[Outcome] = asyncio.Queue()
        self._window = asyncio.Semaphore(_WINDOW)

    async def room(self) -> None:
        """Waits until another plan may be out."""
        await self._window.acquire()

    def check_order(self, plan: StepPlan, last_epoch: int) -> None:
        """Raises EpochRefused unless this plan follows the last one; the first must have a new epoch.

        last_epoch: the highest on this executor so far.
        """
        if plan.epoch < last_epoch or (self.epoch == 0 and plan.epoch == last_epoch):
            raise EpochRefused(f"epoch {plan.epoch} is old: the last one was {last_epoch}")
        if self.epoch not in (0, plan.epoch):
            raise EpochRefused(f"epoch {plan.epoch} in a stream of epoch {self.epoch}")
        if plan.step_id != self._next_step_id:
            raise EpochRefused(f"step {plan.step_id} where step {self._next_step_id} was due")
        self.epoch = plan.epoch
        self._next_step_id += 1

    def deliver(self, outcome: Outcome) -> None:
        """Thread-safe."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it everybody who could be told
            self._loop.call_soon_threadsafe(self._outcomes.put_nowait, outcome)

    def fail(self, kind: FailureKind, message: str) -> None:
        """Ends the stream at once, with no regard to plans that are out."""
        self._outcomes.put_nowait(Failure(kind, message))

    async def outcome(self) -> Outcome:
        """The next one: results in order, then one Failure or EndOfPlans."""
        outcome = await self._outcomes.get()
        if not isinstance(outcome, Failure | EndOfPlans):
            self._window.release()
        return outcome
