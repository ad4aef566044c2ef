"""When plans are made: late enough for who comes, early enough for the executor."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from scheduler.core import Request, Scheduler, SchedulerLimits, SequenceParams, StepPlan, TokenLogprobs
from scheduler.engine.engine import Engine
from scheduler.engine.plan_timing import LEAD_SHARE, MIN_ARRIVALS, MIN_LEAD_S, Arrivals, Pace, could_join, lead_s
from scheduler.engine.step_trace import ExecutorTimings, StepTrace, StepTraces
from tests.support.scheduler.engine_rig import RecordingSink, running_engine, submit, until
from tests.support.scheduler.fake_client import FakeClient


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


def taught(*steps: StepTrace) -> Pace:
    """A pace that has seen these steps, and a request just now."""
    pace = Pace()
    pace.arrivals.add(time.monotonic())
    for each in steps:
        pace.learn(each)
    return pace


def in_flight(*steps: StepTrace) -> StepTraces:
    traces = StepTraces()
    for each in steps:
        traces.planned(each)
    return traces


def core(max_num_seqs: int = 4, max_in_flight: int = 2) -> Scheduler:
    limits = SchedulerLimits(max_num_seqs, 64, 64, max_in_flight=max_in_flight)
    scheduler = Scheduler(limits, num_blocks=65, block_size=4)
    scheduler.executor_attached(1, 65)
    return scheduler


# --- what a step takes ------------------------------------------------------------------------------------------------


def test_a_step_takes_what_its_decodes_took_and_its_prompt_tokens_on_top() -> None:
    pace = taught(step(8, busy_s=0.1), step(8, 50, busy_s=0.3))
    assert pace.expected_s(step(8)) == pytest.approx(0.1)
    assert pace.expected_s(step(8, 25)) == pytest.approx(0.2)
    assert pace.expected_s(step(0, 25)) == pytest.approx(0.1)


def test_many_prompt_tokens_say_more_of_one_than_few_do() -> None:
    """A millisecond of noise on a prompt of two tokens is half a millisecond for each of them."""
    pace = taught(step(8, busy_s=0.1), step(8, 200, busy_s=0.3), step(8, 2, busy_s=0.103))
    assert pace.expected_s(step(0, 100)) == pytest.approx(0.1, rel=0.02)


def test_a_machine_that_becomes_faster_is_believed_within_some_steps() -> None:
    pace = taught(*[step(8, busy_s=0.1)] * 50, *[step(8, busy_s=0.02)] * 12)
    assert pace.expected_s(step(8)) == pytest.approx(0.02, rel=0.15)


def test_of_what_nothing_is_known_nothing_is_held_back() -> None:
    pace = Pace()
    assert pace.expected_s(step(8, 100)) == 0.0
    assert pace.held_until_s(core(), in_flight(step(8, 100, planned_s=NOW_S))) is None


# --- when the next plan is made ---------------------------------------------------------------------------------------

NOW_S = time.monotonic()
LONG_S = 1000.0


def test_the_first_plan_is_made_at_once() -> None:
    assert taught(step(8, busy_s=LONG_S)).held_until_s(core(), StepTraces()) is None


def test_the_next_plan_is_made_a_lead_before_the_step_ends() -> None:
    pace = taught(step(8, busy_s=LONG_S))
    held_until_s = pace.held_until_s(core(), in_flight(step(8, planned_s=NOW_S)))
    assert held_until_s == pytest.approx(NOW_S + LONG_S * (1 - LEAD_SHARE))
    assert pace.held_until_s(core(), in_flight(step(8, planned_s=NOW_S - LONG_S * (1 - LEAD_SHARE)))) is None


def test_a_step_begins_when_the_one_before_it_is_done() -> None:
    pace = taught(step(8, busy_s=LONG_S))
    traces = in_flight(step(8, planned_s=NOW_S), step(8, planned_s=NOW_S))
    traces.committed(int((NOW_S + 900) * 1e9), int((NOW_S + 901) * 1e9), ExecutorTimings())
    assert pace.held_until_s(core(), traces) == pytest.approx(NOW_S + 900 + LONG_S * (1 - LEAD_SHARE))


def test_a_third_plan_waits_for_the_end_of_the_second_step() -> None:
    pace = taught(step(8, busy_s=LONG_S))
    traces = in_flight(step(8, planned_s=NOW_S), step(8, planned_s=NOW_S))
    held_until_s = pace.held_until_s(core(max_in_flight=3), traces)
    assert held_until_s == pytest.approx(NOW_S + LONG_S * (2 - LEAD_SHARE))


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_nobody_wakes_up_for_a_plan_that_may_not_leave(max_in_flight: int) -> None:
    pace = taught(step(8, busy_s=LONG_S))
    traces = in_flight(*[step(8, planned_s=NOW_S)] * max_in_flight)
    assert pace.held_until_s(core(max_in_flight=max_in_flight), traces) is None


def test_after_a_short_step_the_next_plan_is_made_at_once() -> None:
    pace = taught(step(8, busy_s=MIN_LEAD_S))
    assert pace.held_until_s(core(), in_flight(step(8, planned_s=time.monotonic()))) is None
    assert lead_s(0.001) == MIN_LEAD_S


def test_nothing_is_held_back_where_nobody_could_be_taken_in_or_somebody_waits() -> None:
    scheduler = core(max_num_seqs=2)
    pace, traces = taught(step(1, busy_s=LONG_S)), in_flight(step(1, planned_s=NOW_S))

    def add(number: int) -> None:
        scheduler.add(Request(number, [1, 2, 3], SequenceParams(max_total_tokens=9)))

    add(1)
    assert not could_join(scheduler)
    assert pace.held_until_s(scheduler, traces) is None
    assert scheduler.schedule() is not None
    assert could_join(scheduler)
    assert pace.held_until_s(scheduler, traces) is not None
    add(2)
    assert scheduler.schedule() is not None
    assert not could_join(scheduler)
    assert pace.held_until_s(scheduler, traces) is None


def test_nothing_is_held_back_where_hardly_anybody_comes() -> None:
    arrivals = Arrivals()
    assert not arrivals.are_likely(0.0, 1000.0)
    for at_s in range(100):
        arrivals.add(float(at_s))
    assert arrivals.are_likely(100.0, 2 * MIN_ARRIVALS)  # one a second
    assert not arrivals.are_likely(100.0, MIN_ARRIVALS / 2)
    assert not arrivals.are_likely(1000.0, 2 * MIN_ARRIVALS)  # for a long time nobody has come
    assert arrivals.are_likely(1000.0, 100.0)
    pace = Pace()
    pace.learn(step(8, busy_s=LONG_S))
    assert pace.held_until_s(core(), in_flight(step(8, planned_s=NOW_S))) is None


# --- in the engine ----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def decoding() -> AsyncIterator[tuple[Engine, RecordingSink, list[StepPlan]]]:
    """Steps of 0.4 s, of which plans are held back for 0.3: a request has just got its third of six tokens. With it the
    plans so far, and those to come."""
    client = FakeClient()
    client.step_s = 0.4
    async with running_engine(client) as engine:
        sink = submit(engine, [1, 2, 3], 6)
        await until(lambda: len(sink.outputs.get(0, [])) == 3)
        assert client.stream is not None
        yield engine, sink, client.stream.plans


async def test_who_comes_while_a_step_computes_is_in_the_next_one() -> None:
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


async def test_a_plan_that_nobody_comes_for_is_out_before_the_step_ends() -> None:
    async with decoding() as (engine, sink, plans):
        num_plans = len(plans)
        await until(lambda: len(plans) > num_plans)
        assert engine.core is not None
        assert engine.core.num_in_flight == 2, "the plan waited for the result"
        await sink.check()


async def test_a_step_that_ends_early_is_followed_before_anybody_is_told() -> None:
    """The machine is suddenly a hundred times faster: the executor does not wait until the plan would have been due."""

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
    assert num_plans[2:4] == [4, 5], "nothing was held back"


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
async def test_plans_that_are_held_back_end_as_others_do(max_in_flight: int) -> None:
    """Requests come, are cancelled and lose their executor while a plan is held back: nobody is stuck, nothing lost."""
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
