"""Tests that plans are made late enough for late arrivals, and early enough for the executor."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from scheduler.core import Request, Scheduler, SchedulerLimits, SequenceParams, StepPlan, TokenLogprobs
from scheduler.engine.engine import Engine
from scheduler.engine.plan_timing import LEAD_SHARE, MIN_LEAD_S, WAKE_S, Arrivals, PlanTiming, could_join, lead_s
from scheduler.engine.step_costs import CostEstimate
from scheduler.engine.step_trace import ExecutorTimings, StepTrace, StepTraces
from tests.support.scheduler.engine_rig import RecordingSink, running_engine, submit
from tests.support.scheduler.fake_client import FakeClient
from tests.support.waiting import until


def step(num_decodes: int, num_prompt_tokens: int = 0, busy_s: float = 0.0, planned_s: float = 1.0) -> StepTrace:
    return StepTrace(
        epoch=1,
        step_id=1,
        num_sequences=num_decodes + 1,
        num_tokens=num_decodes + num_prompt_tokens,
        planned_ns=int(planned_s * 1e9),
        num_decodes=num_decodes,
        timings=ExecutorTimings(forward_ns=int(busy_s * 1e9)),
    )


def estimate_after(*steps: StepTrace) -> CostEstimate:
    estimate = CostEstimate()
    for each in steps:
        estimate.learn(each)
    return estimate


def timing_after(*steps: StepTrace) -> PlanTiming:
    """Returns a timing whose estimate has learnt from these steps, with a request that has just arrived."""
    timing = PlanTiming(estimate_after(*steps))
    timing.arrivals.add(time.monotonic())
    return timing


def in_flight(*steps: StepTrace) -> StepTraces:
    traces = StepTraces()
    for each in steps:
        traces.add(each)
    return traces


def core(max_num_seqs: int = 4, max_in_flight: int = 2) -> Scheduler:
    limits = SchedulerLimits(max_num_seqs, 64, 64, max_in_flight=max_in_flight)
    scheduler = Scheduler(limits, num_blocks=65, block_size=4)
    scheduler.executor_attached(1, 65)
    return scheduler


# --- the time of a step -----------------------------------------------------------------------------------------------


def test_the_expected_time_of_a_step_adds_decodes_and_prompt_tokens() -> None:
    estimate = estimate_after(*[step(8, busy_s=0.1)] * 4, *[step(8, 200, busy_s=0.3), *[step(8, busy_s=0.1)] * 4] * 20)
    assert estimate.expected_s(step(8)) == pytest.approx(0.1, rel=0.05)
    assert estimate.expected_s(step(8, 100)) == pytest.approx(0.2, rel=0.05)
    assert estimate.expected_s(step(8, 200)) == pytest.approx(0.3, rel=0.05)


def test_long_prompts_weigh_more_than_short_ones() -> None:
    """A millisecond of noise on a prompt of two tokens is half a millisecond for each of them."""
    steps = [step(8, busy_s=0.1), step(8, 200, busy_s=0.3)] * 50
    before = estimate_after(*steps).expected_s(step(8, 200))
    estimate = estimate_after(*steps, *[step(8, 2, busy_s=0.103)] * 3)
    assert estimate.expected_s(step(8, 200)) == pytest.approx(before, rel=0.02)


def test_a_chunk_deep_in_a_prompt_is_expected_to_take_longer_than_its_first() -> None:
    """Attention makes the last chunks of a prompt of 100,000 tokens many times as slow as the first ones."""

    def chunk(num_before: int) -> StepTrace:
        num_pairs = 512 * num_before + 512 * 513 // 2
        return replace(step(0, 512, busy_s=0.05 + 4e-8 * num_pairs), num_prefill_pairs=num_pairs)

    estimate = estimate_after(*[chunk(num_before) for num_before in range(0, 50_000, 512)])
    for num_before in (50_176, 100_352):
        assert estimate.expected_s(chunk(num_before)) == pytest.approx(chunk(num_before).timings.busy_ns / 1e9, rel=0.1)


def test_the_expected_time_follows_a_machine_that_becomes_faster() -> None:
    estimate = estimate_after(*[step(8, busy_s=0.1)] * 50, *[step(8, busy_s=0.02)] * 12)
    assert estimate.expected_s(step(8)) == pytest.approx(0.02, rel=0.15)


def test_no_plan_is_delayed_before_the_first_step_is_measured() -> None:
    assert estimate_after().expected_s(step(8, 100)) == 0.0
    assert timing_after().delayed_until_s(core(), in_flight(step(8, 100, planned_s=NOW_S))) is None


# --- the time of the next plan ----------------------------------------------------------------------------------------

NOW_S = time.monotonic()
LONG_S = 1e6  # the suite may take longer than 1000 s from here to these tests


def test_the_first_plan_is_made_at_once() -> None:
    assert timing_after(step(8, busy_s=LONG_S)).delayed_until_s(core(), StepTraces()) is None


def test_the_next_plan_is_made_a_lead_before_the_step_ends() -> None:
    timing = timing_after(step(8, busy_s=LONG_S))
    delayed_until_s = timing.delayed_until_s(core(), in_flight(step(8, planned_s=NOW_S)))
    assert delayed_until_s == pytest.approx(NOW_S + LONG_S * (1 - LEAD_SHARE))
    assert timing.delayed_until_s(core(), in_flight(step(8, planned_s=NOW_S - LONG_S * (1 - LEAD_SHARE)))) is None


def test_a_step_begins_when_the_step_before_it_is_done() -> None:
    timing = timing_after(step(8, busy_s=LONG_S))
    traces = in_flight(step(8, planned_s=NOW_S), step(8, planned_s=NOW_S))
    traces.commit_oldest(int((NOW_S + 900) * 1e9), int((NOW_S + 901) * 1e9), ExecutorTimings())
    assert timing.delayed_until_s(core(), traces) == pytest.approx(NOW_S + 900 + LONG_S * (1 - LEAD_SHARE))


def test_a_third_plan_waits_for_the_end_of_the_second_step() -> None:
    timing = timing_after(step(8, busy_s=LONG_S))
    traces = in_flight(step(8, planned_s=NOW_S), step(8, planned_s=NOW_S))
    delayed_until_s = timing.delayed_until_s(core(max_in_flight=3), traces)
    assert delayed_until_s == pytest.approx(NOW_S + LONG_S * (2 - LEAD_SHARE))


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_no_delay_is_set_for_a_plan_that_may_not_be_sent_yet(max_in_flight: int) -> None:
    timing = timing_after(step(8, busy_s=LONG_S))
    traces = in_flight(*[step(8, planned_s=NOW_S)] * max_in_flight)
    assert timing.delayed_until_s(core(max_in_flight=max_in_flight), traces) is None


def test_after_a_short_step_the_next_plan_is_made_at_once() -> None:
    timing = timing_after(step(8, busy_s=MIN_LEAD_S))
    assert timing.delayed_until_s(core(), in_flight(step(8, planned_s=time.monotonic()))) is None
    assert lead_s(0.001) == MIN_LEAD_S


def test_no_plan_is_delayed_if_all_slots_are_taken_or_a_request_is_waiting() -> None:
    scheduler = core(max_num_seqs=2)
    timing, traces = timing_after(step(1, busy_s=LONG_S)), in_flight(step(1, planned_s=NOW_S))

    def add(number: int) -> None:
        scheduler.add(Request(number, [1, 2, 3], SequenceParams(max_total_tokens=9)))

    add(1)
    assert not could_join(scheduler)
    assert timing.delayed_until_s(scheduler, traces) is None
    assert scheduler.schedule() is not None
    assert could_join(scheduler)
    assert timing.delayed_until_s(scheduler, traces) is not None
    add(2)
    assert scheduler.schedule() is not None
    assert not could_join(scheduler)
    assert timing.delayed_until_s(scheduler, traces) is None


def test_with_all_slots_taken_a_plan_is_delayed_for_tenants_that_have_nothing_in_the_queue() -> None:
    scheduler = core(max_num_seqs=1)

    def add(number: int, tenant: str) -> None:
        scheduler.add(Request(number, [1, 2, 3], SequenceParams(max_total_tokens=9), tenant=tenant))

    add(1, "one")
    assert scheduler.schedule() is not None
    assert not could_join(scheduler)  # no other tenant is known
    add(2, "other")
    assert could_join(scheduler)
    add(3, "one")
    assert not could_join(scheduler)


def test_with_a_free_slot_a_plan_is_delayed_for_tenants_that_have_nothing_in_the_queue() -> None:
    """Otherwise the slot that a tenant's request has left is filled, and its next one displaces the new sequence."""
    scheduler = core(max_num_seqs=2)

    def add(number: int, tenant: str) -> None:
        scheduler.add(Request(number, [1, 2, 3], SequenceParams(max_total_tokens=9), tenant=tenant))

    add(1, "one")
    add(2, "other")
    assert scheduler.schedule() is not None
    add(3, "one")
    scheduler.cancel(2)
    assert scheduler.state.batch.num_free_slots == 1
    assert could_join(scheduler)
    add(4, "other")
    assert not could_join(scheduler)


def test_no_plan_is_delayed_if_arrivals_are_rare() -> None:
    arrivals = Arrivals()
    assert not arrivals.are_likely(0.0, 1000.0, 1000.0)
    for at_s in range(100):
        arrivals.add(float(at_s))
    assert arrivals.are_likely(100.0, 2 * WAKE_S, saved_s=1.0)  # one a second
    assert not arrivals.are_likely(100.0, WAKE_S / 2, saved_s=1.0)
    assert not arrivals.are_likely(100.0, 2 * WAKE_S, saved_s=0.1)
    assert not arrivals.are_likely(1000.0, 2 * WAKE_S, saved_s=1.0)  # no request has arrived for a long time
    assert arrivals.are_likely(1000.0, 100.0, saved_s=1.0)
    timing = PlanTiming(estimate_after(step(8, busy_s=LONG_S)))
    assert timing.delayed_until_s(core(), in_flight(step(8, planned_s=NOW_S))) is None


# --- in the engine ----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def decoding() -> AsyncIterator[tuple[Engine, RecordingSink, list[StepPlan]]]:
    """Runs an engine with steps of 0.4 s, whose plans are delayed by 0.3 s, until a request has three of six tokens.

    Yields the engine, the request's sink, and the list of plans, which grows.
    """
    client = FakeClient()
    client.step_s = 0.4
    async with running_engine(client) as engine:
        sink = submit(engine, [1, 2, 3], 6)
        await until(lambda: len(sink.outputs.get(0, [])) == 3)
        assert client.stream is not None
        yield engine, sink, client.stream.plans


async def test_a_request_that_arrives_during_a_step_joins_the_next_plan() -> None:
    async with decoding() as (engine, first, plans):
        num_plans = len(plans)
        assert engine.core is not None
        assert engine.core.num_in_flight == 1
        second = submit(engine, [4, 5, 6], 2)
        await until(lambda: len(plans) > num_plans)
        assert len(plans[num_plans].admissions) == 1
        assert engine.core.num_in_flight == 2
        await first.check()
        await second.check()


async def test_a_plan_without_late_arrivals_is_sent_before_the_step_ends() -> None:
    async with decoding() as (engine, sink, plans):
        num_plans = len(plans)
        await until(lambda: len(plans) > num_plans)
        assert engine.core is not None
        assert engine.core.num_in_flight == 2, "the plan waited for the result"
        await sink.check()


async def test_the_plan_after_a_step_that_ends_early_is_sent_before_the_clients_are_told() -> None:
    """The machine suddenly becomes a hundred times faster; the executor must not wait until the plan is due."""

    class PlanCountingSink(RecordingSink):
        def tokens(self, index: int, token_ids: list[int], logprobs: list[TokenLogprobs] | None = None) -> None:
            super().tokens(index, token_ids, logprobs)
            assert client.stream is not None
            num_plans.append(len(client.stream.plans))

    num_plans: list[int] = []
    client = FakeClient()
    client.step_s = 0.3
    async with running_engine(client) as engine:
        request = Request(engine.new_request_id(), [1, 2, 3], SequenceParams(max_total_tokens=13))
        sink = PlanCountingSink(request)
        engine.submit(request, sink)
        await until(lambda: len(num_plans) == 3)
        client.step_s = 0.005
        await sink.check()
    assert all(number >= min(n + 1, 10) for n, number in enumerate(num_plans, start=1))
    assert num_plans[2:4] == [4, 5], "no plan was delayed"


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
async def test_requests_complete_though_plans_are_delayed(max_in_flight: int) -> None:
    """Requests arrive, are cancelled and lose their executor while a plan is delayed; none hangs and none is lost."""
    client = FakeClient()
    client.step_s = 0.05
    async with running_engine(client, max_in_flight=max_in_flight) as engine:
        for round_number in range(3):
            sinks = [submit(engine, [1, 2, 3 + i], 6) for i in range(3)]
            await until(lambda: all(len(sink.outputs.get(0, [])) >= 2 for sink in sinks))  # noqa: B023
            engine.cancel(sinks[0].request.request_id)
            if round_number == 1:
                client.lose()
            for sink in sinks[1:]:
                await sink.check()
        last = submit(engine, [5, 5], 50)
        await until(lambda: len(last.outputs.get(0, [])) >= 2)
        engine.cancel(last.request.request_id)
        async with asyncio.timeout(10):
            await engine.drain()
        await until(lambda: engine.core is not None and not engine.core.num_in_flight)
        assert engine.kv_usage().num_active_blocks == 0
