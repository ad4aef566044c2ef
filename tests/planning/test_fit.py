"""Fitting a cost model to measured steps."""

import json
from dataclasses import astuple
from pathlib import Path
from random import Random

import pytest

from bench.step_traces import save_chrome_trace
from planning.errors import PlanningError
from planning.fit import FittedCost, fit_cost
from planning.measured_steps import MeasuredStep, read_steps, timed, turnaround_s
from quire.block_map import StepTrace
from scheduler.core.inspect.step_load import StepLoad

KNOWN = FittedCost(1.2e-3, 3e-5, 4e-8, 2e-4, 5e-6, 1e-9)


def drawn_load(random: Random) -> StepLoad:
    num_decodes, num_prefills = random.randint(0, 64), random.choice((0, 0, 1, 2))
    num_prefill_tokens = num_prefills * random.randint(1, 200)
    return StepLoad(
        num_decodes,
        num_decodes * random.randint(1, 500),
        num_prefills,
        num_prefill_tokens,
        num_prefill_tokens * random.randint(1, 100),
        num_decodes + num_prefills,
    )


def test_a_fit_recovers_known_coefficients() -> None:
    random = Random(1)
    loads = [drawn_load(random) for _ in range(200)]
    fit = fit_cost([(load, KNOWN.step_s(load)) for load in loads])
    assert astuple(fit.cost) == pytest.approx(astuple(KNOWN), rel=1e-6)
    assert fit.mean_error_ratio < 1e-9
    assert fit.num_steps == 200


def test_noise_does_not_move_the_mean() -> None:
    random = Random(2)
    loads = [drawn_load(random) for _ in range(4000)]
    fit = fit_cost([(load, KNOWN.step_s(load) * random.choice((0.5, 1.5))) for load in loads])
    for load in loads[:20]:
        assert fit.cost.step_s(load) == pytest.approx(KNOWN.step_s(load), rel=0.1)
    assert fit.mean_error_ratio == pytest.approx(0.5, rel=0.05)


def test_no_coefficient_is_negative() -> None:
    """If steps get shorter with more decodes, the cost of a decode is 0 and not negative."""
    fit = fit_cost([(StepLoad(n, 10 * n, num_sampled=n), 2e-3 - 1e-5 * n) for n in range(1, 33)])
    assert min(astuple(fit.cost)) >= 0
    assert fit.cost.overhead_s == pytest.approx(2e-3 - 1e-5 * 16.5)
    assert (fit.cost.decode_s, fit.cost.decode_pair_s) == (0, 0)


def test_all_runs_have_the_same_weight() -> None:
    """Two runs of different lengths have the same load; the machine was three times as fast in one of them."""
    load = StepLoad(4, 400, num_sampled=4)
    fit = fit_cost([(load, 1e-3)] * 1000, [(load, 3e-3)] * 10)
    # errors are relative: (s / 1 ms - 1)^2 + (s / 3 ms - 1)^2 has its minimum at s = 1.2 ms
    assert fit.cost.step_s(load) == pytest.approx(1.2e-3)


def test_terms_that_occur_in_no_step_are_zero() -> None:
    fit = fit_cost([(StepLoad(n, n * m), 1e-3 + 1e-5 * n) for n in range(1, 9) for m in (1, 7)])
    assert fit.cost.prefill_token_s == 0
    assert fit.cost.decode_s == pytest.approx(1e-5)


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(PlanningError, match="5 steps are too few"):
        fit_cost([(StepLoad(1, 1), 1.0)] * 5)


def step(epoch: int, planned_s: float, received_s: float, num_decodes: int) -> MeasuredStep:
    return MeasuredStep(epoch, planned_s, received_s, StepLoad(num_decodes, num_decodes))


def test_a_step_lasts_from_result_to_result() -> None:
    steps = [
        step(1, 0.0, 1.0, 0),
        step(1, 0.1, 1.5, 1),  # planned long before the result it follows
        step(1, 1.6, 2.5, 1),  # planned late: the wait for the plan is part of the step
        step(1, 4.0, 4.75, 0),  # no sequence was decoding: the server was idle until this step was planned
        step(2, 9.0, 10.0, 1),  # another executor
    ]
    assert [step_s for _, step_s in timed(steps)] == [0.5, 1.0, 0.75]
    assert turnaround_s(steps) == 1.5
    assert turnaround_s(steps[:2]) is None


def trace(step_id: int, planned_ns: int, received_ns: int) -> StepTrace:
    return StepTrace(
        epoch=3,
        step_id=step_id,
        num_sequences=5,
        num_tokens=24,
        planned_ns=planned_ns,
        sent_ns=planned_ns + 100,
        received_ns=received_ns,
        committed_ns=received_ns + 100,
        queue_ns=0,
        prepare_ns=10,
        forward_ns=10,
        sample_ns=10,
        idle_ns=0,
        num_decodes=4,
        num_decode_pairs=90,
        num_prefill_pairs=210,
    )


def test_a_saved_trace_is_read(tmp_path: Path) -> None:
    """A trace in the format of bench, with a step of a 20-token prompt and four decodes."""
    path = tmp_path / "steps.json"
    save_chrome_trace(path, [trace(9, 1_000_000, 3_000_000), trace(10, 2_000_000, 5_500_000)])
    first, second = read_steps(path)
    assert first.load == StepLoad(4, 90, 1, 20, 210, 5)
    assert (first.epoch, first.planned_s, first.received_s) == (3, pytest.approx(1e-3), pytest.approx(3e-3))
    assert second.received_s == pytest.approx(5.5e-3)


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"traceEvents": []}', '{"traceEvents": [{"name": "step 1 send", "ph": "X", "args": {}}]}', "7"],
)
def test_invalid_traces_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "steps.json"
    path.write_text(content)
    with pytest.raises(PlanningError, match=r"steps\.json"):
        read_steps(path)
    with pytest.raises(PlanningError, match="No such file"):
        read_steps(tmp_path / "none.json")


def test_a_trace_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    path.write_text(json.dumps({"traceEvents": [{"name": "something", "ph": "X", "ts": 1, "dur": 1}] * 3}))
    with pytest.raises(PlanningError, match="0 steps are too few"):
        read_steps(path)
