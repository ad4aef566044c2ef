"""The load that a core reports, counted by hand."""

from dataclasses import replace

import pytest

from scheduler.core import (
    Request,
    Scheduler,
    SchedulerLimits,
    SequenceParams,
    StepCosts,
    StepResult,
    oldest_waiting_s,
)
from scheduler.core.inspect.core_load import core_load

BLOCK = 16


def core(max_num_seqs: int = 2, *, enable_prefix_caching: bool = True) -> Scheduler:
    limits = SchedulerLimits(max_num_seqs, 64, 1024, target_inter_token_latency_s=0.03)
    scheduler = Scheduler(limits, num_blocks=200, block_size=BLOCK, enable_prefix_caching=enable_prefix_caching)
    scheduler.executor_attached(1, 200)
    return scheduler


def add(scheduler: Scheduler, number: int, prompt: list[int]) -> None:
    scheduler.add(Request(number, prompt, SequenceParams(max_total_tokens=len(prompt) + 50)))


def step(scheduler: Scheduler) -> None:
    plan = scheduler.schedule()
    assert plan is not None
    num_sampled = len(scheduler.state.in_flight[-1].sampled)
    scheduler.commit(StepResult(1, plan.step_id, [0] * num_sampled))


def queued(scheduler: Scheduler) -> tuple[int, int, int]:
    load = core_load(scheduler)
    return load.num_running, load.num_waiting, load.num_queued_tokens


def test_an_idle_core_has_no_load() -> None:
    assert queued(core()) == (0, 0, 0)
    load = core_load(core())
    assert (load.prefill_s_per_token, load.decode_step_s) == (0.0, 0.0)


def test_prompts_count_until_they_are_computed() -> None:
    """Steps take 64 tokens: a prompt of 100 takes two of them."""
    scheduler = core()
    add(scheduler, 1, list(range(100)))
    assert queued(scheduler) == (0, 1, 100)
    plan = scheduler.schedule()
    assert plan is not None
    assert queued(scheduler) == (1, 0, 100)  # planned, not computed
    scheduler.commit(StepResult(1, plan.step_id, []))
    assert queued(scheduler) == (1, 0, 36)
    step(scheduler)
    assert queued(scheduler) == (1, 0, 0)


def test_cached_prefixes_do_not_count() -> None:
    scheduler = core()
    prompt = list(range(64))
    add(scheduler, 1, prompt)
    step(scheduler)
    add(scheduler, 2, [*prompt, *range(900, 910)])
    assert queued(scheduler) == (1, 1, 10)


def test_a_prefix_that_several_wait_for_counts_once() -> None:
    scheduler = core()
    shared = list(range(160))
    for number in range(4):
        add(scheduler, number, [*shared, 1000 + number])
    assert queued(scheduler) == (0, 4, 160 + 4)
    scheduler.schedule()
    assert core_load(scheduler).num_queued_tokens == 160 + 4


def test_a_deferred_sequence_that_pauses_counts() -> None:
    """It holds no blocks, and will compute its prompt again, of which 64 tokens are cached."""
    scheduler = core(max_num_seqs=1)
    scheduler.expire(0.0)
    add(scheduler, 1, [*range(64), 99])
    for _ in range(2):
        plan = scheduler.schedule()
        assert plan is not None
        is_last = len(scheduler.state.in_flight[-1].sampled) == 1
        scheduler.commit(StepResult(1, plan.step_id, [0] * is_last, deferred=[0] * is_last))
    assert queued(scheduler) == (0, 1, 1)
    assert oldest_waiting_s(scheduler, 0.25) == 0.25
    add(scheduler, 2, list(range(200, 230)))
    assert queued(scheduler) == (0, 2, 31)
    scheduler.schedule()
    assert queued(scheduler) == (1, 1, 31)


def test_without_prefix_caching_every_token_counts() -> None:
    scheduler = core(enable_prefix_caching=False)
    for number in range(3):
        add(scheduler, number, list(range(50)))
    assert queued(scheduler) == (0, 3, 150)


def test_the_rest_of_a_long_queue_counts_as_its_beginning() -> None:
    scheduler = core()
    for number in range(100):
        add(scheduler, number, [number] * 40)
    assert queued(scheduler) == (0, 100, 4000)


def test_decodes_slow_down_prompts_and_each_other() -> None:
    """A decode takes 10 ms of the target of 30 ms, so prompts get two thirds of the time."""
    scheduler = core()
    scheduler.set_costs(costs := StepCosts(step_s=0.008, decode_s=0.001, decode_pair_s=1e-5, token_s=1e-4))
    assert core_load(scheduler).prefill_s_per_token == 1e-4
    add(scheduler, 1, list(range(60)))
    step(scheduler)
    scheduler.state.batch.decoding[0].num_planned_tokens = 100
    load = core_load(scheduler)
    assert load.prefill_s_per_token == pytest.approx(1.5e-4)
    assert load.decode_step_s == pytest.approx(0.001 + 100 * 1e-5)
    scheduler.set_costs(replace(costs, step_s=0.1))  # decodes alone take longer than the target
    assert core_load(scheduler).prefill_s_per_token == pytest.approx(2e-4)


def test_without_a_target_prompts_take_what_they_need() -> None:
    scheduler = Scheduler(SchedulerLimits(2, 64, 1024), num_blocks=200, block_size=BLOCK)
    scheduler.executor_attached(1, 200)
    scheduler.set_costs(StepCosts(step_s=0.01, token_s=1e-4))
    add(scheduler, 1, list(range(60)))
    step(scheduler)
    assert core_load(scheduler).prefill_s_per_token == 1e-4
