"""A step that is ready to be launched, one that runs on the device, and its result."""

import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from executor.cuda.accelerator import Mark
from executor.cuda.graphs import StepKind
from executor.cuda.step_arrays import HostArray, StepArrays
from executor.plans.plan import EndReason, Ints, Reports, StepOutput, StepPlan, StepTimings
from executor.sampling.finite import FiniteCheck
from executor.slots.sampling_table import Draw
from executor.slots.step_inputs import StepInputs
from kernels.triton import RESULT_FIELDS


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A step that is ready to be launched.

    num_computed  tokens of the slots of step.sampling that are computed after this step, unless they ended before it
    draw          how these slots sample
    arrays        arrays to send to the device
    bucket        number of rows of the graph to run, of this kind; 0 if the step is not decode-only
    """

    plan: StepPlan
    step: StepInputs
    num_computed: Ints
    draw: Draw
    arrays: StepArrays[HostArray]
    kind: StepKind
    bucket: int
    started_ns: int


@dataclass(frozen=True, slots=True)
class Marks:
    """Marks of a step on the device: after its inputs arrive, between model and sampler, and after its last work.

    previous_end is the end of the step before, if there was one.
    """

    start: Mark
    forwarded: Mark
    end: Mark
    previous_end: Mark | None


class CudaLaunchedStep:
    """Implements `executor.device.results_thread.LaunchedStep`."""

    def __init__(
        self,
        prepared: PreparedStep,
        generations: NDArray[np.int64],
        results: Tensor | None,
        arrived: Mark,
        marks: Marks,
        prepare_ns: int,
        reports: Reports,
        finite: FiniteCheck,
    ) -> None:
        """Arrays are in the order of step.sampling[R].

        results[R, RESULT_FIELDS] int32 are on the host once `arrived` is reached. generations[R] are the slot
        generations of the step: how many sequences each slot has held.
        """
        self._plan = prepared.plan
        self._step = prepared.step
        self._generations = generations
        self._num_computed = prepared.num_computed
        self._results = results
        self._arrived = arrived
        self._marks = marks
        self._prepare_ns = prepare_ns
        self._reports = reports
        self._finite = finite
        self._lock = threading.Lock()
        self._output: StepOutput | None = None
        self._has_ended = np.zeros(len(prepared.step.sampling), dtype=np.bool_)

    @property
    def is_finished(self) -> bool:
        return self._output is not None

    def finish(self) -> StepOutput:
        """Waits for the device. Any thread may call it, any number of times.

        Raises the error of a failed step, and ModelBroken for too many rows that are not finite.
        """
        with self._lock:
            if self._output is None:
                self._output = self._read()
            return self._output

    def sampled(self) -> Ints:
        """Returns the sampled tokens in the order of the slots. Waits for the device."""
        token_ids = self.finish().token_ids
        own: Ints = token_ids[np.searchsorted(self._step.reporting, self._step.sampling)]
        return own

    def end(self, reasons: NDArray[np.uint8]) -> None:
        """Ends sequences for reasons[R] that only the host knows, which are those of grammars. Waits for the device.

        Call it before another thread has the step. A row that is not finite keeps its own reason.
        """
        is_own = (reasons == EndReason.GRAMMAR) | (reasons == EndReason.DEFERRED)
        if not is_own.any():
            return
        known = self.finish().end_reasons
        places = np.searchsorted(self._step.reporting, self._step.sampling)
        is_own &= known[places] != EndReason.NOT_FINITE
        known[places[is_own]] = reasons[is_own]
        self._has_ended = self._has_ended | is_own

    def ended(self, generations: NDArray[np.int64]) -> tuple[Ints, Ints]:
        """Returns the slots that have ended by this step's result and still hold the same sequence.

        The second array has the number of tokens that each of them has computed at most.
        generations: the slot generations of all slots now.
        """
        is_same = generations[self._step.sampling] == self._generations
        has_ended = is_same & self._has_ended
        return self._step.sampling[has_ended], self._num_computed[has_ended]

    def _read(self) -> StepOutput:
        self._arrived.wait()
        token_ids = np.zeros(len(self._step.reporting), dtype=np.int32)
        end_reasons = np.zeros(len(self._step.reporting), dtype=np.uint8)
        results: NDArray[np.int32] = np.empty((0, RESULT_FIELDS), dtype=np.int32)  # no slot has sampled
        if self._results is not None:
            results = self._results.numpy().view(np.int32).reshape(-1, RESULT_FIELDS)
        self._finite.count(self._step, results[:, 1] == EndReason.NOT_FINITE, self._reports)
        places = np.searchsorted(self._step.reporting, self._step.sampling)
        token_ids[places] = results[:, 0]
        end_reasons[places] = results[:, 1]
        had_ended = results[:, 2] != 0
        self._has_ended = had_ended | (results[:, 1] != 0)
        self._num_computed -= had_ended  # the row of this step was not written
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
