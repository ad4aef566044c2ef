"""Slots in a known state, and plans to check against them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from executor.plans.limits import PlanLimits
from executor.plans.plan import Admission, SequenceParams, StepPlan
from executor.slots.slots import Slots
from tests.support.executor.plan_driver import ints, tuples

LIMITS = PlanLimits(
    vocab_size=100, max_model_len=20, block_size=4, num_blocks=10, max_num_seqs=4, max_num_batched_tokens=12
)
PARAMS = SequenceParams(max_total_tokens=15)
BEAM = replace(PARAMS, num_candidates=4)


def admission(slot: int = 2, num_tokens: int = 5, computed: int = 0, blocks=(5, 6), params=PARAMS) -> Admission:
    return Admission(slot, ints(*range(num_tokens)), computed, ints(*blocks), params)


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def plan(**deltas) -> StepPlan:
    return StepPlan(1, 2, **deltas)


def with_params(**changes) -> StepPlan:
    return plan(admissions=(admission(params=replace(PARAMS, **changes)),))


def beams(*branches: tuple[int, int, int], **deltas) -> StepPlan:
    return plan(branches=tuples(3, *branches), **deltas)


def busy_slots() -> Slots:
    """Returns slots of which slot 0 decodes its seventh token, slot 1 has ended, slots 2 and 3 are empty."""
    slots = Slots(LIMITS)
    slots.apply(
        StepPlan(
            1,
            1,
            admissions=(
                admission(0, 6, blocks=(1, 2)),
                Admission(1, ints(7, 8), 0, ints(3), replace(PARAMS, eos_token_ids=ints(50))),
            ),
            row_counts=tuples(2, (0, 6), (1, 2)),
        )
    )
    slots.advance()
    slots.append(ints(0, 1), ints(40, 50))
    slots.apply(StepPlan(1, 2, row_counts=tuples(2, (0, 1), (1, 1))))
    return slots


def state(slots: Slots) -> dict[str, np.ndarray]:
    """Returns a copy of the state that a rejected plan must not change."""
    counters = slots.counters
    names = ("is_admitted", "has_ended", "is_beam", "num_tokens", "num_computed_tokens", "num_blocks", "row_count")
    return {name: getattr(counters, name).copy() for name in names} | {
        "token_ids": slots.token_ids.copy(),
        "block_tables": slots.block_tables.copy(),
        "temperatures": slots._sampling._params.temperature.copy(),
        "seeds": slots._sampling._seeds.copy(),
    }
