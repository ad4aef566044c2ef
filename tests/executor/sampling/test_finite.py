"""Sequences whose logits are not finite end with an error, and the other sequences of the batch go on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from executor.errors import ModelBroken
from executor.plans.plan import EndReason
from executor.sampling import finite
from executor.sampling.finite import MAX_ROWS, finite_rows
from tests.support.executor.plan_driver import PlanDriver, ints
from tests.support.executor.poison import (
    Poison,
    PoisonedModel,
    check_that_only_the_victim_ends,
    check_that_reports_are_marked,
    fork_in_a_poisoned_step,
    step_in_turn,
)

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
    model, num_steps = runner.model.forward, iter(range(100))

    def forward(*arguments: object) -> torch.Tensor:
        logits = model(*arguments).clone()
        if next(num_steps) == 3:
            BAD_ROWS[bad](logits[1])
        return logits

    runner.model.forward = forward
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


def test_all_other_sequences_of_the_batch_keep_their_bits(checkpoint, make_runner) -> None:
    """With the kernels that serve, whose rows do not depend on the batch."""
    runner, poison = make_runner(checkpoint("llama").directory, kernels="auto"), Poison()
    PoisonedModel(runner, poison)
    check_that_only_the_victim_ends(runner, poison)


@pytest.mark.parametrize(
    ("params", "name", "row"),
    [({"num_candidates": 4}, "candidates", 0), ({"num_prompt_logprobs": 2}, "prompt_logprobs", 2)],
    ids=["beam", "prompt"],
)
def test_reports_on_bad_rows_are_marked(params, name, row, checkpoint, make_runner) -> None:
    """The logits of two sequences that sample come before those of their prompts."""
    runner, poison = make_runner(checkpoint("llama").directory), Poison([row])
    PoisonedModel(runner, poison)
    check_that_reports_are_marked(runner, poison, params, name)


def test_a_beam_without_allowed_tokens_is_no_failure(checkpoint, make_runner) -> None:
    driver = PlanDriver(make_runner(checkpoint("llama").directory))
    driver.admit([1, 2], 8, allowed_token_ids=ints(7), eos_token_ids=ints(7), min_total_tokens=6, num_candidates=2)
    candidates = driver.step().reports.candidates
    assert candidates is not None
    assert candidates.values.tolist() == [-INF, -INF]


def test_samples_that_share_a_row_count_once(checkpoint, make_runner) -> None:
    runner, poison = make_runner(checkpoint("llama").directory), Poison()
    PoisonedModel(runner, poison)
    assert fork_in_a_poisoned_step(runner, poison) == [EndReason.NOT_FINITE] * 3
    step_in_turn(runner, poison, [True] * (MAX_ROWS - 2))
    with pytest.raises(ModelBroken):
        step_in_turn(runner, poison, [True])


@pytest.mark.parametrize(("poisoned", "num_prompts"), [([True], MAX_ROWS), ([True, False] * MAX_ROWS, 1)])
def test_several_bad_rows_mean_that_the_process_is_broken(poisoned, num_prompts, checkpoint, make_runner) -> None:
    """At once or apart, with finite rows between them."""
    runner, poison = make_runner(checkpoint("llama").directory), Poison(None)
    PoisonedModel(runner, poison)
    with pytest.raises(ModelBroken, match="not finite in 3 rows within 1,000 steps"):
        step_in_turn(runner, poison, poisoned, num_prompts)


def test_fewer_bad_rows_do_not(checkpoint, make_runner) -> None:
    runner, poison = make_runner(checkpoint("llama").directory), Poison(None)
    PoisonedModel(runner, poison)
    step_in_turn(runner, poison, [True], MAX_ROWS - 1)
    step_in_turn(runner, poison, [False] * 3)


def test_bad_rows_are_forgotten_in_time(checkpoint, make_runner, monkeypatch) -> None:
    monkeypatch.setattr(finite, "WINDOW_STEPS", 2 * MAX_ROWS)
    runner, poison = make_runner(checkpoint("llama").directory), Poison(None)
    PoisonedModel(runner, poison)
    step_in_turn(runner, poison, [True, False, False] * 3 * MAX_ROWS)
    with pytest.raises(ModelBroken):
        step_in_turn(runner, poison, [True, False] * MAX_ROWS)
