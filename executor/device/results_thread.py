"""The thread that waits for launched steps and delivers outcomes, so that the device thread does neither.

Outcomes are delivered in the order in which they were put. A step that fails while it is finished ends its epoch, like
one that fails at its launch.
"""

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from executor.plans.plan import Publication, StepOutput, StepPlan
from quire.unexpected import unexpected

_log = logging.getLogger(__name__)


class LaunchedStep(Protocol):
    """A step that may still be running on the device."""

    def finish(self) -> StepOutput:
        """Waits for the device. Raises the error of a step that failed there."""
        ...


class Runner(Protocol):
    """The interface of `executor.device.runner.ModelRunner` and `executor.cuda.runner.CudaRunner` to the device thread.

    reset    empties the slots for a new epoch. For a digest scheme, waits for launched steps, and returns the blocks
             that were published under it: none if is_trusted is False, or if one of these steps failed
    execute  raises PlanRejected, in which case nothing has changed; calls `computing` right before it computes
    """

    def reset(self, digest_scheme: str = "", *, is_trusted: bool = True) -> Publication: ...
    def execute(self, plan: StepPlan, computing: Callable[[], None]) -> StepOutput | LaunchedStep: ...


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A launched step, and the callbacks for its outcome: `finished`, or `failed` if it raised an error."""

    launched: LaunchedStep
    finished: Callable[[StepOutput], None]
    failed: Callable[[Exception], None]


class ResultsThread:
    """A thread that starts at once and runs until `stop`."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Unfinished | Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="results", daemon=True)
        self._thread.start()

    def put(self, work: Unfinished | Callable[[], None]) -> None:
        """Adds a step to wait for, or a callback to call once everything before it is done."""
        self._work.put(work)

    def stop(self) -> None:
        """Returns when everything that was put is done."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            self._handle(work)

    def _handle(self, work: Unfinished | Callable[[], None]) -> None:
        """Does one piece of work. An error that nothing expects loses one outcome, which the scheduler notices."""
        try:
            if isinstance(work, Unfinished):
                self._finish(work)
            else:
                work()
        except Exception:  # noqa: BLE001  # see above
            _log.exception("an outcome of the device could not be delivered")
            unexpected("delivery")

    def _finish(self, work: Unfinished) -> None:
        try:
            work.finished(work.launched.finish())
        except Exception as error:  # noqa: BLE001  # any error ends the epoch of the step
            _log.exception("a step failed on the device")
            unexpected("step")
            work.failed(error)
