"""Fits a cost model to measured steps by linear least squares.

    step_s = overhead + decode x num_decodes + decode_pair x num_decode_pairs
                      + prefill x num_prefills + prefill_token x num_prefill_tokens + prefill_pair x num_prefill_pairs

Throughput depends on means, so slow steps are not discarded as outliers. Each of several runs has the same weight,
regardless of the number and the duration of its steps. No coefficient is negative: a term whose coefficient comes out
negative is dropped, and the others are fitted again.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np

from planning.errors import PlanningError
from planning.measured_steps import TimedStep
from scheduler.core.inspect.step_load import StepLoad


@dataclass(frozen=True, slots=True)
class FittedCost:
    """A linear CostModel; all coefficients are in seconds."""

    overhead_s: float
    decode_s: float
    decode_pair_s: float
    prefill_s: float
    prefill_token_s: float
    prefill_pair_s: float

    def step_s(self, load: StepLoad) -> float:
        return (
            self.overhead_s
            + self.decode_s * load.num_decodes
            + self.decode_pair_s * load.num_decode_pairs
            + self.prefill_s * load.num_prefills
            + self.prefill_token_s * load.num_prefill_tokens
            + self.prefill_pair_s * load.num_prefill_pairs
        )


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted cost model and its quality.

    mean_error_ratio  mean absolute error of the measured steps, divided by the mean step
    """

    cost: FittedCost
    num_steps: int
    mean_error_ratio: float


def fit_cost(*runs: Sequence[TimedStep]) -> Fit:
    """Fits a cost model to the steps of several runs. Raises PlanningError if there are fewer steps than terms."""
    steps = [step for run in runs for step in run]
    if len(steps) < len(FittedCost.__dataclass_fields__):
        raise PlanningError(f"{len(steps)} steps are too few to fit a cost model to")
    rows = np.array([_terms(load) for load, _ in steps], dtype=np.float64)
    seconds = np.array([step_s for _, step_s in steps], dtype=np.float64)
    weights = np.concatenate([_weights(run) for run in runs])
    cost = FittedCost(*_non_negative_least_squares(rows * weights[:, None], seconds * weights))
    errors = np.abs(rows @ np.array(astuple(cost)) - seconds)
    mean_s = float(seconds.mean())
    return Fit(cost, len(steps), float(errors.mean()) / mean_s if mean_s > 0 else 0.0)


def _weights(run: Sequence[TimedStep]) -> np.ndarray:
    """Returns weights that make errors relative to the run's mean step and give every run the same total weight."""
    mean_s = sum(step_s for _, step_s in run) / max(1, len(run))
    return np.full(len(run), 1.0 / (mean_s * len(run) ** 0.5) if mean_s > 0 else 1.0)


def _terms(load: StepLoad) -> tuple[float, ...]:
    return (
        1,
        load.num_decodes,
        load.num_decode_pairs,
        load.num_prefills,
        load.num_prefill_tokens,
        load.num_prefill_pairs,
    )


def _non_negative_least_squares(rows: np.ndarray, values: np.ndarray) -> list[float]:
    """Returns least-squares coefficients that are not negative; drops negative terms, the most negative one first."""
    scale = np.abs(rows).max(axis=0)
    active = [i for i in range(rows.shape[1]) if scale[i] > 0]
    found = np.zeros(rows.shape[1])
    while active:
        solution = np.linalg.lstsq(rows[:, active] / scale[active], values, rcond=None)[0]
        if solution.min() >= 0:
            found[active] = solution / scale[active]
            break
        del active[int(solution.argmin())]
    return [float(term) for term in found]
