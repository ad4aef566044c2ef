"""Compares the GPU's runner with the reference, step by step."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from executor.plans.plan import StepPlan
from tests.support.cuda.runner_pair import DEVICE
from tests.support.executor.plan_driver import PlanDriver, ints, tuples

if TYPE_CHECKING:
    from executor.device.runner import ModelRunner
    from executor.slots.step_inputs import StepInputs
    from tests.support.cuda.random_streams import RandomStream

# In the interpreter, a step takes a quarter of a second, so these seeds make every event happen early.
NUM_STEPS = 60 if DEVICE.type == "cuda" else 16


ALL_KINDS = (
    *("admitted", "admitted with a prefix", "row", "row of a prompt", "row of an ended one"),
    *("fork", "fork of an ended one", "copy", "EOS", "STOP", "LENGTH"),
)


class NoDeviceReads(TorchDispatchMode):
    """Fails if the host waits for a number on the device or for a shape that depends on one."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "item", "equal", "is_nonzero")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in self.FORBIDDEN, f"{name} reads from the device"
        if name in ("index", "index_put_"):
            indices = [index for index in args[1] if index is not None]
            assert all(index.dtype not in (torch.bool, torch.uint8) for index in indices), "an index by a mask"
        return func(*args, **(kwargs or {}))


class TopTwo:
    """A wrapper of the reference's sampling that describes where another runner's tokens differ from its own.

    Greedy tokens of two runners may differ where the two largest logits nearly tie, because the runners add in another
    order. A difference at a large gap is an error, for instance of a race.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._sample = runner._sample
        self._last: dict[int, tuple[list[int], list[float]]] = {}
        self._reporting: list[int] = []
        runner._sample = self.sample

    def remove(self) -> None:
        self._runner._sample = self._sample

    def sample(self, step: StepInputs, logits: torch.Tensor | None) -> object:
        if logits is not None:
            self._note(step, logits)
        return self._sample(step, logits)

    def _note(self, step: StepInputs, logits: torch.Tensor) -> None:
        best = logits.float().topk(2, dim=-1)
        ids, values = best.indices.tolist(), best.values.tolist()
        places = zip(step.sampling.tolist(), step.sampled_logits.tolist(), strict=True)
        self._last = {slot: (ids[place], values[place]) for slot, place in places}
        self._reporting = step.reporting.tolist()

    def describe(self) -> dict[int, str]:
        """Returns what is known of the sampled tokens of the last step, by their place in its result."""
        reporting, self._reporting, texts = self._reporting, [], {}
        for place, slot in enumerate(reporting):
            if slot in self._last:
                ids, (best, second) = self._last[slot]
                texts[place] = (
                    f"slot {slot}'s most likely are {ids}, with a gap of {best - second:.3g} below {best:.6g}"
                )
        return texts


def assert_same(actual, expected, top_two: dict[int, str] | None = None) -> None:
    """Compares two results. top_two: what `TopTwo.describe` says of the expected one."""
    assert (actual.epoch, actual.step_id) == (expected.epoch, expected.step_id)
    own, others = actual.token_ids.tolist(), expected.token_ids.tolist()
    if own != others and len(own) == len(others):
        for place in (place for place in range(len(own)) if own[place] != others[place]):
            text = (top_two or {}).get(place, "the slot's logits are not known")
            print(f"step {expected.step_id}: token {own[place]} in place of {others[place]}; in the reference, {text}")
    assert own == others, expected.step_id
    assert actual.end_reasons.tolist() == expected.end_reasons.tolist(), expected.step_id
    assert (actual.token_ids.dtype, actual.end_reasons.dtype) == (np.int32, np.uint8)


def run_stream(pair, stream: RandomStream, num_ahead: int, num_steps: int = NUM_STEPS) -> None:
    """Launches num_ahead plans before it takes the first result."""
    for runner in (pair.reference, pair.cuda):
        runner.reset()
    top_two = TopTwo(pair.reference)
    launched = deque()
    for _ in range(num_steps):
        plan = stream.plan()
        expected = pair.reference.execute(plan)
        with NoDeviceReads():
            launched.append((pair.cuda.execute(plan), expected, top_two.describe()))
        if len(launched) == num_ahead:
            step, expected, texts = launched.popleft()
            assert_same(step.finish(), expected, texts)
            stream.learn(expected)
    for step, expected, texts in launched:
        assert_same(step.finish(), expected, texts)
    top_two.remove()


def _first_plan(driver: PlanDriver) -> StepPlan:
    """Returns the plan of a driver's first step with one prompt of at most eight tokens, in blocks 1 and 2."""
    (admission,) = driver._admissions
    return StepPlan(
        driver.epoch,
        1,
        admissions=(replace(admission, block_table=ints(1, 2)),),
        row_counts=tuples(2, (0, len(admission.token_ids))),
    )


def _counts(step_id: int) -> np.ndarray:
    """Returns the row counts of a decode: one row per step, set in the second step."""
    return tuples(2, (0, 1)) if step_id == 2 else tuples(2)
