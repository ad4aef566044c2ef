"""Sequences whose logits are not finite end with an error, and the other sequences of the batch go on."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

from executor.errors import ModelBroken
from executor.plans.plan import EndReason
from executor.sampling.finite import MAX_STEPS, finite_rows
from tests.support.executor.plan_driver import PlanDriver, generate, ints

if TYPE_CHECKING:
    from collections.abc import Callable

    from executor.device.runner import ModelRunner

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
NAN, INF = math.nan, math.inf
BAD_ROWS = {
    "a NaN": lambda row: row.index_fill_(0, torch.tensor([5]), NAN),
    "a negative NaN": lambda row: row.view(torch.int32).index_fill_(0, torch.tensor([5]), -(1 << 22)),
    "+inf": lambda row: row.index_fill_(0, torch.tensor([5]), INF),
    "only NaN": lambda row: row.fill_(NAN),
    "only -inf": lambda row: row.fill_(-INF),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_finite_if_their_greatest_logit_is(dtype: torch.dtype) -> None:
    rows = torch.tensor([[0, 1, 2], [0, -INF, 2], [0, NAN, 2], [NAN, 9, 2], [0, 1, INF], [-INF] * 3, [INF, NAN, -INF]])
    assert finite_rows(rows.to(dtype)).tolist() == [True, True] + [False] * 5
    assert finite_rows(rows[:0].to(dtype)).tolist() == []


class PoisonedModel:
    """A runner's model that changes the logits of chosen steps: `poison` gets (number of the step, logits)."""

    def __init__(self, runner: ModelRunner, poison: Callable[[int, torch.Tensor], object]) -> None:
        self._model, self._poison, self.pool, self._num_steps = runner.model, poison, runner.model.pool, 0
        runner.model = self  # type: ignore[assignment]

    def forward(self, *arguments: Any) -> torch.Tensor:
        logits = self._model.forward(*arguments).clone()
        self._poison(self._num_steps, logits)
        self._num_steps += 1
        return logits

    def copy_blocks(self, copies: Any) -> None:
        self._model.copy_blocks(copies)


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "top_k": 5}, {"temperature": 1.0, "min_p": 0.1}], ids=repr)
@pytest.mark.parametrize("bad", BAD_ROWS)
def test_only_the_sequence_of_a_bad_row_ends(checkpoint, make_runner, bad: str, params: dict[str, Any]) -> None:
    runner = make_runner(checkpoint("llama").directory)

    def outputs() -> list[tuple[list[int], EndReason]]:
        driver = PlanDriver(runner)
        sequences = [driver.admit(prompt, 8, num_logprobs=2, **params) for prompt in PROMPTS]
        driver.run()
        return [(sequence.output, sequence.reason) for sequence in sequences]

    expected = outputs()
    PoisonedModel(runner, lambda number, logits: number == 3 and BAD_ROWS[bad](logits[1]))
    first, failed, last = outputs()
    assert [first, last] == [expected[0], expected[2]]
    assert failed[1] is EndReason.NOT_FINITE
    assert failed[0][:3] == expected[1][0][:3]
    assert len(failed[0]) == 4  # the last token has no meaning


def test_a_constraint_without_allowed_tokens_is_no_failure(checkpoint, make_runner) -> None:
    """The only allowed token is an end id, and the minimum length forbids it."""
    driver = PlanDriver(make_runner(checkpoint("llama").directory))
    sequence = driver.admit([1, 2, 3], 8, allowed_token_ids=ints(7), eos_token_ids=ints(7), min_total_tokens=6)
    driver.run()
    assert sequence.reason is not EndReason.NOT_FINITE


def test_several_steps_without_a_finite_row_mean_that_the_model_is_broken(checkpoint, make_runner) -> None:
    runner = make_runner(checkpoint("llama").directory)
    PoisonedModel(runner, lambda number, logits: logits.fill_(NAN))
    for _ in range(MAX_STEPS - 1):
        driver = PlanDriver(runner)
        sequence = driver.admit([1, 2, 3], 8)
        driver.run()
        assert sequence.reason is EndReason.NOT_FINITE
    with pytest.raises(ModelBroken, match="not finite in 3 steps in a row"):
        generate(runner, [[1, 2, 3]], 8)


def test_a_finite_row_between_bad_steps_shows_that_the_model_works(checkpoint, make_runner) -> None:
    runner = make_runner(checkpoint("llama").directory)
    PoisonedModel(runner, lambda number, logits: number % MAX_STEPS and logits.fill_(NAN))
    for _ in range(4 * MAX_STEPS):
        generate(runner, [[1, 2, 3]], 1)


def test_beams_and_prompts_without_finite_logits_fail_the_step(checkpoint, make_runner) -> None:
    for params in ({"num_candidates": 4}, {"num_prompt_logprobs": 1}):
        runner = make_runner(checkpoint("llama").directory)
        PoisonedModel(runner, lambda number, logits: logits.fill_(NAN))
        with pytest.raises(FloatingPointError, match="not finite"):
            generate_with(runner, params)


def generate_with(runner: ModelRunner, params: dict[str, int]) -> None:
    driver = PlanDriver(runner)
    driver.admit([1, 2, 3], 8, **params)
    driver.step()
