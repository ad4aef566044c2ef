"""A batch of every kind of sequence in which one row of logits is not finite."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from executor.plans.plan import EndReason, Fork
from tests.support.executor.plan_driver import DrivenSequence, PlanDriver, ints

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from executor.device.runner import ModelRunner

NUM_STEPS = 8
POISONED_STEP = 3
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "seed": 7},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 1.0},
    "log-probabilities": {"num_logprobs": 3},
    "prompt log-probabilities": {"num_prompt_logprobs": 2},
}


@dataclass(slots=True)
class Poison:
    """Writes NaN to rows of logits while it is armed. rows: None: all of them."""

    rows: list[int] | None = field(default_factory=lambda: [0])
    is_armed: bool = False

    def into(self, logits: torch.Tensor) -> torch.Tensor:
        if not self.is_armed:
            return logits
        poisoned = logits.clone()
        for row in range(len(logits)) if self.rows is None else self.rows:
            poisoned[row, 5] = math.nan
        return poisoned

    def wrap(self, logits: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *arguments: self.into(logits(*arguments))


class PoisonedModel:
    """A model of a `ModelRunner` with a poison in its logits."""

    def __init__(self, runner: ModelRunner, poison: Poison) -> None:
        self.pool, self.copy_blocks = runner.model.pool, runner.model.copy_blocks
        self.forward = poison.wrap(runner.model.forward)
        runner.model = self  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of a batch: the victim's output and end, and all that the other sequences got."""

    victim: list[int]
    reason: EndReason
    others: dict[str, list[int]]
    reports: dict[str, list[float]]


def run_batch(runner: ModelRunner, poison: Poison, *, is_poisoned: bool) -> Outcome:
    """Runs a victim in slot 0, a sequence of each kind, and a beam of width 1, for NUM_STEPS steps."""
    driver = PlanDriver(runner)
    victim = driver.admit([1, 2, 3], NUM_STEPS)
    others = {kind: driver.admit([4, 5, 6, number], NUM_STEPS, **KINDS[kind]) for number, kind in enumerate(KINDS)}
    beam = driver.admit([9, 8], NUM_STEPS + 2, num_candidates=3)
    reports: dict[str, list[float]] = {"logprobs": [], "prompt_logprobs": [], "candidates": []}
    branches: tuple[tuple[DrivenSequence, DrivenSequence, int], ...] = ()
    for number in range(NUM_STEPS):
        poison.is_armed = is_poisoned and number == POISONED_STEP
        output = driver.step(branches=branches)
        for name, values in reports.items():
            if (part := getattr(output.reports, name)) is not None:
                values += part.values.tolist()
        assert output.reports.candidates is not None
        branches = ((beam, beam, int(output.reports.candidates.token_ids[0])),)
        if victim.reason and victim in driver.sequences:
            driver.retire(victim)
    outputs = {kind: sequence.output for kind, sequence in others.items()} | {"beam": beam.output}
    return Outcome(victim.output, victim.reason, outputs, reports)


def check_that_only_the_victim_ends(runner: ModelRunner, poison: Poison) -> None:
    """Compares a batch with a poisoned victim to the same batch without a poison, bit by bit."""
    expected = run_batch(runner, poison, is_poisoned=False)
    actual = run_batch(runner, poison, is_poisoned=True)
    assert actual.reason is EndReason.NOT_FINITE
    assert actual.victim[:POISONED_STEP] == expected.victim[:POISONED_STEP]
    assert len(actual.victim) == POISONED_STEP + 1, "the last token has no meaning"
    assert actual.others == expected.others
    assert actual.reports == expected.reports
    assert {len(values) for values in expected.reports.values()} == {3 * NUM_STEPS, 2 * 3}


def check_that_reports_are_marked(runner: ModelRunner, poison: Poison, params: dict[str, int], name: str) -> None:
    """Checks that the report on a poisoned first step is NaN, and that of a sequence beside it is not."""
    driver = PlanDriver(runner)
    for prompt in ([1, 2, 3], [4, 5]):
        driver.admit(prompt, 4, **params)
    poison.is_armed = True
    (values,) = (getattr(driver.step().reports, name).values,)
    poison.is_armed = False
    width = next(iter(params.values()))
    assert np.isnan(values).reshape(-1, width).all(axis=1).tolist() == [True] + [False] * (len(values) // width - 1)
    assert not np.isnan(values[width:]).any()


def fork_in_a_poisoned_step(runner: ModelRunner, poison: Poison) -> list[EndReason]:
    """Forks a sequence into three as its first token is sampled. Returns the ends of all three."""
    driver = PlanDriver(runner)
    driver.admit([1, 2, 3], 4, temperature=1.0)
    poison.is_armed = True
    driver.step(forks=(Fork(0, 1, 5), Fork(0, 2, 6)))
    poison.is_armed = False
    return [sequence.reason for sequence in driver.sequences]


def step_in_turn(
    runner: ModelRunner, poison: Poison, poisoned: list[bool], num_prompts: int = 1, **params: object
) -> None:
    """Runs a step of new prompts for each of `poisoned`, with the poison armed or not."""
    for number, is_poisoned in enumerate(poisoned):
        driver = PlanDriver(runner, epoch=number + 1)
        for prompt in range(num_prompts):
            driver.admit([1 + prompt, 2], 4, eos_token_ids=ints(3), **params)
        poison.is_armed = is_poisoned
        driver.step()
