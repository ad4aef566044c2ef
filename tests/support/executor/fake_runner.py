"""A runner without a model that accepts any plan, and fails or hangs on request."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import torch

from executor.errors import PlanRejected
from executor.loading import LoadedModel
from executor.plans.limits import PlanLimits
from executor.plans.plan import Publication, StepOutput, StepPlan, StepTimings

if TYPE_CHECKING:
    from collections.abc import Callable

LIMITS = PlanLimits(
    vocab_size=100, max_model_len=64, block_size=4, num_blocks=33, max_num_seqs=4, max_num_batched_tokens=32
)


class FakeRunner:
    """A runner whose steps each sample one token: the step's id.

    errors    errors that steps raise instead, by step id
    gate      steps wait for it; open at first
    entered   set by the first step
    trusted   for each reset, whether the pool was trusted
    retained  what each reset returns
    """

    def __init__(self) -> None:
        self.limits = LIMITS
        self.errors: dict[int, Exception] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.num_resets = 0
        self.trusted: list[bool] = []
        self.retained = Publication()
        self.executed: list[tuple[int, int]] = []

    def reset(self, digest_scheme: str = "", *, is_trusted: bool = True) -> Publication:
        self.num_resets += 1
        self.trusted.append(is_trusted)
        return self.retained

    def execute(self, plan: StepPlan, computing: Callable[[], None] = lambda: None) -> StepOutput:
        computing()
        self.entered.set()
        self.gate.wait(30)
        if plan.step_id in self.errors:
            raise self.errors[plan.step_id]
        if (plan.retired_slots >= LIMITS.max_num_seqs).any():
            raise PlanRejected("retired_slots: out of range")
        self.executed.append((plan.epoch, plan.step_id))
        return StepOutput(
            plan.epoch,
            plan.step_id,
            np.array([plan.step_id], dtype=np.int32),
            np.array([0], dtype=np.uint8),
            StepTimings(prepare_ns=1_000, forward_ns=2_000, sample_ns=3_000),
        )


def loaded(runner: FakeRunner) -> LoadedModel:
    return LoadedModel(
        runner=runner,  # type: ignore[arg-type]
        model_name="fake",
        dtype=torch.float32,
        device=torch.device("cpu"),
        memory_bytes={"weights": 10, "kv_pool": 20},
        startup_s={"weights": 0.5},
    )
