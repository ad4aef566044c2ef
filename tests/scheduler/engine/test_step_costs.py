"""Tests that the costs of steps are estimated well enough to choose the size of the next ones."""

from random import Random

import pytest

from scheduler.core import Request, Scheduler, SchedulerLimits, SequenceParams, StepCosts, StepResult
from scheduler.core.inspect.step_load import LoadTracker, StepLoad
from scheduler.engine.step_costs import MAX_ERROR, CostEstimate
from scheduler.engine.step_trace import ExecutorTimings, StepTrace
from tests.support.scheduler.engine_rig import running_engine, submit
from tests.support.scheduler.fake_client import FakeClient

SMALL_ON_CPU = StepCosts(3e-3, 3e-4, 5e-7, 4e-4, 1.2e-7, 1e-3)
LARGE_ON_GPU = StepCosts(5e-3, 1e-5, 5e-8, 3e-5, 1.2e-9, 1e-5)


def time_s(costs: StepCosts, load: StepLoad) -> float:
    return (
        costs.decodes_s(load.num_decodes, load.num_decode_pairs)
        + costs.token_s * load.num_prefill_tokens
        + costs.pair_s * load.num_prefill_pairs
        + costs.report_s * load.num_reported
    )


def trace(load: StepLoad, busy_s: float) -> StepTrace:
    return StepTrace(
        1, 1, 1, load.num_tokens, 0,
        num_decodes=load.num_decodes,
        num_decode_pairs=load.num_decode_pairs,
        num_prefill_pairs=load.num_prefill_pairs,
        num_reported=load.num_reported,
        timings=ExecutorTimings(forward_ns=int(busy_s * 1e9)),
    )  # fmt: skip


def serve(costs: StepCosts, target_s: float, *, num_reports: int = 0, seed: int = 0) -> list[tuple[StepLoad, float]]:
    """Serves chats beside long prompts, with steps that take what `costs` says; returns them, with their times."""
    random = Random(seed)
    limits = SchedulerLimits(64, 4096, 16384, target_inter_token_latency_s=target_s)
    core, loads, estimate = Scheduler(limits, num_blocks=8000, block_size=16), LoadTracker(), CostEstimate()
    core.executor_attached(1, 8000)
    for i in range(1, 40):
        length = random.choice((50, 50, 300, 6000))
        params = SequenceParams(length + 100, num_prompt_logprobs=5 * (length == 300 and i <= num_reports))
        core.add(Request(i, [i] * length, params))
    steps, in_flight = [], []
    while core.num_unfinished_requests:
        while (plan := core.schedule()) is not None:
            in_flight.append((plan.step_id, loads.follow(plan)))
        step_id, load = in_flight.pop(0)
        busy_s = time_s(costs, load) * random.uniform(0.9, 1.1)
        steps.append((load, busy_s))
        core.commit(StepResult(1, step_id, [0] * load.num_sampled))
        estimate.learn(trace(load, busy_s))
        core.set_costs(estimate.costs)
    return steps


@pytest.mark.parametrize(("costs", "target_s"), [(SMALL_ON_CPU, 0.1), (SMALL_ON_CPU, 0.3), (LARGE_ON_GPU, 0.05)])
def test_steps_with_decodes_and_long_prompts_come_close_to_the_target(costs: StepCosts, target_s: float) -> None:
    full = [
        busy_s / target_s
        for load, busy_s in serve(costs, target_s)
        if load.num_decodes and load.num_prefill_tokens > 32 and load.num_prefill_pairs > 1000 * load.num_prefill_tokens
    ]
    assert len(full) > 20
    full.sort()
    assert 0.8 < full[len(full) // 2] < 1.2
    assert full[len(full) * 9 // 10] < 1.5


def test_costs_that_a_step_does_not_have_are_kept() -> None:
    estimate = CostEstimate()
    for _ in range(20):
        estimate.learn(trace(StepLoad(0, 0, 1, 200, 20_100), 0.1))
    before = estimate.costs
    for _ in range(50):
        estimate.learn(trace(StepLoad(8, 800), 0.5))
    assert (estimate.costs.token_s, estimate.costs.pair_s) == (before.token_s, before.pair_s)
    assert estimate.costs.decodes_s(8, 800) == pytest.approx(0.5, rel=0.01)


def test_the_costs_follow_a_machine_that_becomes_slower() -> None:
    estimate = CostEstimate()
    for busy_s in [0.1] * 20 + [0.4] * 20:
        estimate.learn(trace(StepLoad(8, 800), busy_s))
    assert estimate.costs.decodes_s(8, 800) == pytest.approx(0.4, rel=0.01)


def test_one_step_that_is_slow_for_reasons_of_its_own_counts_little() -> None:
    estimate = CostEstimate()
    for busy_s in [0.1] * 20 + [60.0]:
        estimate.learn(trace(StepLoad(8, 800), busy_s))
    assert estimate.costs.decodes_s(8, 800) <= 0.1 * (1 + MAX_ERROR)


def test_a_reported_prompt_token_is_found_to_cost_more() -> None:
    estimate = CostEstimate()
    for _ in range(30):
        for num_reported in (0, 200):
            load = StepLoad(0, 0, 1, 200, 20_100, 1, num_reported)
            estimate.learn(trace(load, 0.005 + 0.00015 * num_reported))
    assert estimate.costs.report_s == pytest.approx(0.00015, rel=0.1)
    assert estimate.costs.report_weight > 3


def test_no_cost_is_negative() -> None:
    estimate, random = CostEstimate(), Random(1)
    for _ in range(300):
        load = StepLoad(
            random.randint(0, 9), random.randint(0, 9999), 1, random.randint(1, 999), random.randint(1, 9999)
        )
        estimate.learn(trace(load, random.uniform(1e-6, 1)))
        costs = estimate.costs
        assert min(costs.step_s, costs.decode_s, costs.decode_pair_s, costs.token_s, costs.pair_s, costs.report_s) >= 0


def test_an_executor_that_does_not_measure_teaches_nothing() -> None:
    estimate = CostEstimate()
    estimate.learn(trace(StepLoad(8, 800), 0.0))
    assert estimate.costs == StepCosts()


async def test_the_engine_tells_the_core_what_steps_have_cost() -> None:
    client = FakeClient()
    client.step_s = 0.004
    async with running_engine(client) as engine:
        assert engine.core is not None
        assert engine.core.state.costs == StepCosts()
        await submit(engine, [1, 2, 3]).check()
        assert engine.core.state.costs.decodes_s(1, 5) == pytest.approx(0.004, rel=0.5)
