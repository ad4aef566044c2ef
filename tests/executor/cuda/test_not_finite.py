"""The GPU's runner ends sequences whose logits are not finite, like the runner for the CPU."""

from __future__ import annotations

import pytest

from executor.errors import ModelBroken
from executor.plans.plan import EndReason
from executor.sampling.finite import MAX_ROWS
from tests.support.cuda.comparison import NoDeviceReads
from tests.support.cuda.runner_pair import FinishingRunner
from tests.support.executor.plan_driver import PlanDriver
from tests.support.executor.poison import (
    Poison,
    check_that_only_the_victim_ends,
    check_that_reports_are_marked,
    fork_in_a_poisoned_step,
    step_in_turn,
)


@pytest.fixture
def poisoned(pair):
    """Returns a function that makes a runner and the poison in its logits. Graphs would keep the logits without it."""

    def make(rows: list[int] | None) -> tuple[FinishingRunner, Poison]:
        runner, poison = pair("llama", captures=False, max_num_seqs=8).cuda, Poison(rows)
        model = runner._forward.model
        model.logits = poison.wrap(model.logits)
        return FinishingRunner(runner), poison

    return make


def test_all_other_sequences_of_the_batch_keep_their_bits(poisoned) -> None:
    check_that_only_the_victim_ends(*poisoned([0]))


@pytest.mark.parametrize(
    ("params", "name"), [({"num_candidates": 4}, "candidates"), ({"num_prompt_logprobs": 2}, "prompt_logprobs")]
)
def test_reports_on_bad_rows_are_marked(params, name, poisoned) -> None:
    """The logits of prompts are computed on their own, so that the poison reaches the first of them too."""
    check_that_reports_are_marked(*poisoned([0]), params, name)


def test_greedy_and_drawn_steps_find_bad_rows_without_waiting_for_the_device(poisoned) -> None:
    """Decode-only steps, with two plans in flight: the row of the step after the bad one is overrun."""
    for params in ({}, {"temperature": 1.0, "seed": 3}):
        runner, poison = poisoned([1])
        driver = PlanDriver(runner)
        sequences = [driver.admit([1, 2, number], 6, **params) for number in range(3)]
        driver.step()
        launches = []
        for is_poisoned in (False, True, False):
            poison.is_armed = is_poisoned
            with NoDeviceReads():
                launches.append(runner.runner.execute(_next_plan(driver)))
        reasons = [launched.finish().end_reasons.tolist() for launched in launches]
        assert reasons == [[0, 0, 0], [0, EndReason.NOT_FINITE, 0], [0, 0, 0]]
        assert len(sequences) == 3


def _next_plan(driver: PlanDriver):
    """Returns the plan of the next step, in which no sequence needs a block, without running it."""
    plans: list = []
    runner, driver.runner = driver.runner, _Recorder(plans)
    with pytest.raises(StopIteration):
        driver.step()
    driver.runner = runner
    for sequence in driver.sequences:
        sequence.num_computed_tokens += 1
        sequence.tokens.append(0)
    return plans[0]


class _Recorder:
    def __init__(self, plans: list) -> None:
        self._plans = plans

    def execute(self, plan: object) -> object:
        self._plans.append(plan)
        raise StopIteration


def test_several_bad_rows_mean_that_the_process_is_broken(poisoned) -> None:
    with pytest.raises(ModelBroken, match="not finite in 3 rows"):
        step_in_turn(*poisoned(None), [True], MAX_ROWS)
    runner, poison = poisoned([0])
    assert fork_in_a_poisoned_step(runner, poison) == [EndReason.NOT_FINITE] * 3
    step_in_turn(runner, poison, [False, True])
    with pytest.raises(ModelBroken, match="not finite in 3 rows"):
        step_in_turn(runner, poison, [True])


def test_bad_rows_of_beams_alone_count(poisoned) -> None:
    """A step of beams samples no token, so that it has no results to fetch from the device."""
    with pytest.raises(ModelBroken, match="not finite in 3 rows"):
        step_in_turn(*poisoned([0]), [True] * MAX_ROWS, num_candidates=2)
