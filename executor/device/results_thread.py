"""The thread that waits for steps which were launched and are not finished, and that tells outcomes, so that the device
thread need do neither.

Outcomes leave in the order in which they were put. A step that fails late ends its epoch like one that fails at once.
"""

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from executor.plans.plan import StepOutput

_log = logging.getLogger(__name__)


class LaunchedStep(Protocol):
    """A step that the device may still be at."""

    def finish(self) -> StepOutput:
        """Waits for the device. Raises what went wrong there."""
        ...


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A launched step, and whom its outcome concerns. `failed` is called instead of `finished` if it went wrong."""

    launched: LaunchedStep
    finished: Callable[[StepOutput], None]
    failed: Callable[[Exception], None]


class ResultsThread:
    """Starts at once."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Unfinished | Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="results", daemon=True)
        self._thread.start()

    def put(self, work: Unfinished | Callable[[], None]) -> None:
        """A step to wait for, or something to call when all that was put before is done."""
        self._work.put(work)

    def stop(self) -> None:
        """Returns when all that was put is done."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            if isinstance(work, Unfinished):
                self._finish(work)
            else:
                work()

    def _finish(self, work: Unfinished) -> None:
        try:
            output = work.launched.finish()
        except Exception as error:  # noqa: BLE001  # whatever it was: it ends the epoch of the step
            _log.exception("a step failed on the device")
            work.failed(error)
        else:
            work.finished(output)
