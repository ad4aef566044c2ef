"""Says since when the device has had a step to compute."""

import threading
import time


class StepsUnderWay:
    """The steps that have begun and not ended, by epoch and number. They may end on another thread, and more than once.

    busy_since_s  time at which one began while no other was under way (time.monotonic); None: none is under way
    """

    def __init__(self) -> None:
        self.busy_since_s: float | None = None
        self._lock = threading.Lock()
        self._steps: set[tuple[int, int]] = set()

    def begin(self, epoch: int, step_id: int) -> None:
        with self._lock:
            if not self._steps:
                self.busy_since_s = time.monotonic()
            self._steps.add((epoch, step_id))

    def end(self, epoch: int, step_id: int) -> None:
        """Has no effect on a step that has ended already."""
        with self._lock:
            self._steps.discard((epoch, step_id))
            if not self._steps:
                self.busy_since_s = None
