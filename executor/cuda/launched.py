"""A step that is under way, and what it becomes."""

import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from executor.cuda.accelerator import Mark
from executor.plans.plan import Ints, Reports, StepOutput, StepPlan, StepTimings
from kernels.triton import RESULT_FIELDS


@dataclass(frozen=True, slots=True)
class Marks:
    """Points of a step on the device: once all it needs is there, between model and sampler, after its last work.

    previous_end: where the step before was done, if there was one.
    """

    start: Mark
    forwarded: Mark
    end: Mark
    previous_end: Mark | None


class LaunchedStep:
    """See `executor.device.results_thread.LaunchedStep`."""

    def __init__(
        self,
        plan: StepPlan,
        reporting: Ints,
        sampling: Ints,
        lives: NDArray[np.int64],
        results: Tensor | None,
        arrived: Mark,
        marks: Marks,
        prepare_ns: int,
        reports: Reports,
    ) -> None:
        """reporting: slots with a result, ascending; sampling[R]: those with a row of results[R, RESULT_FIELDS], which
        are on the host once `arrived` is reached. lives[R]: the how-manieth life of the slot this was."""
        self._plan = plan
        self._reporting = reporting
        self._sampling = sampling
        self._lives = lives
        self._results = results
        self._arrived = arrived
        self._marks = marks
        self._prepare_ns = prepare_ns
        self._reports = reports
        self._lock = threading.Lock()
        self._output: StepOutput | None = None
        self._has_ended = np.zeros(len(sampling), dtype=np.bool_)

    @property
    def is_finished(self) -> bool:
        return self._output is not None

    def finish(self) -> StepOutput:
        """Waits for the device. Any thread may call it, any number of times. Raises what went wrong on the device."""
        with self._lock:
            if self._output is None:
                self._output = self._read()
            return self._output

    def sampled(self) -> Ints:
        """What the slots have sampled, in their order. Waits for the device."""
        token_ids = self.finish().token_ids
        own: Ints = token_ids[np.searchsorted(self._reporting, self._sampling)]
        return own

    def ended(self, lives: NDArray[np.int64]) -> Ints:
        """Slots known to have ended by this step's result. lives: of all slots, now; ended lives tell nothing new."""
        same_life = lives[self._sampling] == self._lives
        ended: Ints = self._sampling[same_life & self._has_ended]
        return ended

    def _read(self) -> StepOutput:
        self._arrived.wait()
        token_ids = np.zeros(len(self._reporting), dtype=np.int32)
        end_reasons = np.zeros(len(self._reporting), dtype=np.uint8)
        if self._results is not None:
            results: NDArray[np.int32] = self._results.numpy().view(np.int32).reshape(-1, RESULT_FIELDS)
            places = np.searchsorted(self._reporting, self._sampling)
            token_ids[places] = results[:, 0]
            end_reasons[places] = results[:, 1]
            self._has_ended = (results[:, 1] != 0) | (results[:, 2] != 0)
        return StepOutput(
            epoch=self._plan.epoch,
            step_id=self._plan.step_id,
            token_ids=token_ids,
            end_reasons=end_reasons,
            timings=self._timings(),
            reports=self._reports,
        )

    def _timings(self) -> StepTimings:
        marks = self._marks
        return StepTimings(
            prepare_ns=self._prepare_ns,
            forward_ns=marks.forwarded.ns_since(marks.start),
            sample_ns=marks.end.ns_since(marks.forwarded),
            idle_ns=0 if marks.previous_end is None else max(0, marks.start.ns_since(marks.previous_end)),
            prepare_overlaps=True,
        )
