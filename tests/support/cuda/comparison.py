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
    from tests.support.cuda.random_streams import RandomStream

# In the interpreter, a step takes a quarter of a second, so these seeds make every event happen early.
NUM_STEPS = 60 if DEVICE.type == "cuda" else 25


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


def assert_same(actual, expected) -> None:
    assert (actual.epoch, actual.step_id) == (expected.epoch, expected.step_id)
    assert actual.token_ids.tolist() == expected.token_ids.tolist(), expected.step_id
    assert actual.end_reasons.tolist() == expected.end_reasons.tolist(), expected.step_id
    assert (actual.token_ids.dtype, actual.end_reasons.dtype) == (np.int32, np.uint8)


def run_stream(pair, stream: RandomStream, num_ahead: int, num_steps: int = NUM_STEPS) -> None:
    """Launches num_ahead plans before it takes the first result."""
    for runner in (pair.reference, pair.cuda):
        runner.reset()
    launched = deque()
    for _ in range(num_steps):
        plan = stream.plan()
        expected = pair.reference.execute(plan)
        with NoDeviceReads():
            launched.append((pair.cuda.execute(plan), expected))
        if len(launched) == num_ahead:
            step, expected = launched.popleft()
            assert_same(step.finish(), expected)
            stream.learn(expected)
    for step, expected in launched:
        assert_same(step.finish(), expected)


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
