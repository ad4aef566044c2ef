"""Tests what the engine tells clients, with a fake executor that works, hangs or is lost."""

import asyncio
from dataclasses import replace
from itertools import count
from typing import ClassVar

import pytest

from scheduler.core import (
    BeamParams,
    CapacityExceeded,
    FinishReason,
    QueueFull,
    Request,
    Scheduler,
    SequenceParams,
    StepPlan,
    StepResult,
    TokenLogprobs,
    Unavailable,
)
from scheduler.engine.engine import Engine, ServerState
from tests.support.core.fake_executor import expected_beams
from tests.support.scheduler.engine_rig import RecordingSink, engine_options, running_engine, submit
from tests.support.scheduler.fake_client import DESCRIPTION, FakeClient
from tests.support.waiting import until


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
async def test_requests_end_with_the_right_tokens(max_in_flight: int) -> None:
    async with running_engine(FakeClient(), max_in_flight=max_in_flight) as engine:
        sinks = [submit(engine, [1] * (3 + i), 5 + i, seeds=tuple(range(1 + i % 3))) for i in range(20)]
        for sink in sinks:
            await sink.check()
        assert engine.kv_usage().num_active_blocks == 0


async def test_beams_arrive_complete_and_the_best_one_first() -> None:
    client = FakeClient()
    async with running_engine(client) as engine:
        sinks = [submit(engine, [i, 2, 3], 20, beam=BeamParams(4, 3)) for i in range(3)]
        other = submit(engine, [7, 8], 30)
        await asyncio.sleep(0.003)
        client.lose()
        for sink in sinks:
            await asyncio.wait_for(sink.done.wait(), 20)
            expected = expected_beams(sink.request, DESCRIPTION.vocab_size)
            assert [sink.outputs[index] for index in range(3)] == [result.token_ids for result in expected]
            assert list(sink.scores.values()) == [result.score for result in expected]
            assert not engine.core.has_request(sink.request.request_id)  # type: ignore[union-attr]
        await other.check()
        assert other.scores == {0: None}
        assert len(engine._dispatcher) == 0
        assert engine.kv_usage().num_active_blocks == 0


async def test_log_probabilities_reach_only_the_requests_that_asked() -> None:
    async with running_engine(FakeClient()) as engine:
        params = SequenceParams(max_total_tokens=12, num_logprobs=3, num_prompt_logprobs=2)
        request = Request(engine.new_request_id(), [1, 2, 3, 4], params, seeds=(0, 1))
        asked, other = RecordingSink(request), submit(engine, [1, 2, 3, 4], 8)
        engine.submit(request, asked)
        await asked.check()
        await other.check()
        for index in range(2):
            assert [entry.token_ids[0] for entry in asked.logprobs[index]] == asked.outputs[index]
            assert all(len(entry.ranks) == 3 for entry in asked.logprobs[index])
        assert [entry.token_ids[0] for entry in asked.prompt] == [2, 3, 4]
        assert (other.logprobs, other.prompt) == ({0: []}, [])


async def test_a_small_token_budget_narrows_the_batch() -> None:
    async with running_engine(FakeClient(), max_num_batched_tokens=3) as engine:
        assert (engine.description.max_num_seqs, engine.description.max_num_batched_tokens) == (3, 3)
        for sink in [submit(engine, [1] * 10, 5) for _ in range(6)]:
            await sink.check()


async def test_requests_survive_the_loss_of_the_executor_at_any_moment() -> None:
    client = FakeClient()
    async with running_engine(client) as engine:
        sinks = [submit(engine, [i, 2, 3, 4, 5], 30, seeds=(i, i + 1)) for i in range(12)]
        for _ in range(5):
            await asyncio.sleep(0.003)
            client.lose()
            await until(lambda: engine.state is ServerState.WAITING_FOR_EXECUTOR)
            await until(lambda: engine.state is ServerState.SERVING)
        for sink in sinks:
            await sink.check()
        assert client.num_streams == 6


@pytest.mark.parametrize("token_id", [-1, DESCRIPTION.vocab_size])
async def test_requests_survive_an_executor_that_returns_invalid_token_ids(token_id: int) -> None:
    """Each epoch begins with a few valid steps. The blocks are small, so that an invalid id would soon be hashed."""
    client = FakeClient()
    results = count(1)

    def lie(result: StepResult) -> StepResult:
        is_valid = next(results) % 7 or client.num_streams > 4
        return result if is_valid else replace(result, token_ids=[token_id] * len(result.token_ids))

    client.lie = lie
    async with running_engine(client) as engine:
        sinks = [submit(engine, [i, 2, 3, 4, 5], 30, seeds=(i, i + 1)) for i in range(12)]
        for sink in sinks:
            await sink.check()
        assert client.num_streams == 5


async def test_requests_queue_while_the_executor_is_away() -> None:
    client = FakeClient()
    async with running_engine(client) as engine:
        client.is_up = False
        client.lose()
        await until(lambda: engine.state is ServerState.WAITING_FOR_EXECUTOR)
        sink = submit(engine, [1, 2, 3])
        await asyncio.sleep(0.05)
        assert not sink.outputs
        client.is_up = True
        await sink.check()


async def test_an_executor_that_hangs_is_abandoned() -> None:
    client = FakeClient()
    async with running_engine(client, step_timeout_s=0.1) as engine:
        client.is_hanging = True
        sink = submit(engine, [1, 2, 3])
        await until(lambda: engine.state is ServerState.WAITING_FOR_EXECUTOR)
        client.is_hanging = False
        await sink.check()


async def test_an_idle_executor_that_hangs_is_abandoned_and_attached_again() -> None:
    client = FakeClient()
    async with running_engine(client, step_timeout_s=0.05) as engine:
        await submit(engine, [1, 2, 3]).check()
        client.is_hanging = True
        await until(lambda: engine.state is ServerState.WAITING_FOR_EXECUTOR)
        assert not engine.is_ready
        client.is_hanging = False
        await until(lambda: engine.is_ready)
        await submit(engine, [1, 2, 3]).check()


async def test_an_idle_executor_is_probed_now_and_then() -> None:
    client = FakeClient()
    async with running_engine(client, step_timeout_s=0.02) as engine:
        await until(lambda: client.num_probes >= 4)
        assert (engine.is_ready, client.num_streams) == (True, 1)


async def test_a_busy_executor_is_not_probed() -> None:
    """Its results show that it works, and an answer would wait behind plans, each of which has its own time."""
    client = FakeClient()
    async with running_engine(client, step_timeout_s=0.2) as engine:
        num_probes = client.num_probes
        client.is_hanging = True
        submit(engine, [1, 2, 3])
        await until(lambda: engine.state is ServerState.WAITING_FOR_EXECUTOR)
        assert client.num_probes == num_probes
        client.is_hanging = False


async def test_a_smaller_pool_fails_only_requests_that_cannot_fit_it(caplog: pytest.LogCaptureFixture) -> None:
    client = FakeClient()
    async with running_engine(client) as engine:
        client.is_up = False
        client.lose()
        await until(lambda: engine.state is ServerState.WAITING_FOR_EXECUTOR)
        large, small = submit(engine, [1] * 100, 20, seeds=(1, 2)), submit(engine, [1] * 10, 20)
        client.description = replace(client.description, num_blocks=12)
        client.is_up = True
        await small.check()
        assert large.reasons == {0: FinishReason.CAPACITY}
    messages = [record.message for record in caplog.records if "is given up" in record.message]
    assert len(messages) == 1
    assert "a prompt of 100 tokens and up to 120 in all never fit" in messages[0]


async def test_a_pool_with_one_block_less_ends_no_open_ended_request() -> None:
    """Its bound is the whole pool, and an executor that measures its memory again seldom gets the same pool."""
    client = FakeClient(replace(DESCRIPTION, num_blocks=41))
    async with running_engine(client) as engine:
        prompt = [1, 2, 3]
        sink = submit(engine, prompt, engine.max_prompt_and_output - len(prompt), is_open_ended=True)
        await sink.first_token.wait()
        client.description = replace(client.description, num_blocks=40)
        client.lose()
        await asyncio.wait_for(sink.done.wait(), 20)
    assert sink.reasons == {0: FinishReason.LENGTH}
    assert len(prompt) + len(sink.outputs[0]) == 39 * 4 + 1


async def test_cancelling_releases_the_blocks_and_tells_the_sink_nothing_more() -> None:
    async with running_engine(FakeClient()) as engine:
        sink, other = submit(engine, [1, 2, 3], 150), submit(engine, [4, 5], 50)
        await sink.first_token.wait()
        engine.cancel(sink.request.request_id)
        num_before = len(sink.outputs[0])
        await other.check()
        assert len(sink.outputs[0]) == num_before
        assert not sink.reasons
        assert engine.kv_usage().num_active_blocks == 0


async def test_stopping_one_sample_leaves_the_others() -> None:
    async with running_engine(FakeClient()) as engine:
        sink = submit(engine, [1, 2, 3], 20, seeds=(1, 2))
        await sink.first_token.wait()
        engine.stop(sink.request.request_id, 1)
        assert sink.reasons == {1: FinishReason.STOP}
        await sink.done.wait()
        assert sink.reasons[0] is FinishReason.LENGTH
        assert len(sink.outputs[0]) == 20


async def test_queued_requests_expire_while_there_is_no_executor() -> None:
    client = FakeClient()
    async with running_engine(client) as engine:
        client.is_up = False
        client.lose()
        await until(lambda: engine.state is ServerState.WAITING_FOR_EXECUTOR)
        sink = submit(engine, [1], deadline_s=0.0)
        await asyncio.wait_for(sink.done.wait(), 10)
        assert sink.reasons == {0: FinishReason.DEADLINE}


async def test_submit_raises_the_reason_for_a_refusal() -> None:
    client = FakeClient()
    async with running_engine(client, max_waiting_requests=2) as engine:
        with pytest.raises(CapacityExceeded, match="one sequence can hold 200"):
            submit(engine, [1] * 150, 100)
        client.is_up = False
        client.lose()
        await until(lambda: engine.state is ServerState.WAITING_FOR_EXECUTOR)
        sinks = [submit(engine, [1]), submit(engine, [2])]
        with pytest.raises(QueueFull) as refused:
            submit(engine, [3])
        assert refused.value.retry_after_s > 0
        client.is_up = True
        for sink in sinks:
            await sink.check()


async def test_a_broken_sink_ends_only_its_own_request() -> None:
    class BrokenSink(RecordingSink):
        def tokens(self, index: int, token_ids: list[int], logprobs: list[TokenLogprobs] | None = None) -> None:
            raise RuntimeError("broken")

    async with running_engine(FakeClient()) as engine:
        broken = Request(engine.new_request_id(), [1], SequenceParams(max_total_tokens=50))
        engine.submit(broken, BrokenSink(broken))
        await submit(engine, [1, 2, 3], 30).check()
        assert engine.core is not None
        assert not engine.core.has_request(broken.request_id)


async def test_plans_are_sent_before_the_clients_are_told() -> None:
    """At every token the executor has two steps to do: the plan that the result made room for has been sent already."""

    class PlanCountingSink(RecordingSink):
        num_plans: ClassVar[list[tuple[int, int]]] = []

        def tokens(self, index: int, token_ids: list[int], logprobs: list[TokenLogprobs] | None = None) -> None:
            super().tokens(index, token_ids, logprobs)
            assert client.stream is not None
            self.num_plans.append((len(self.outputs[0]), len(client.stream.plans)))

    client = FakeClient()
    async with running_engine(client, max_in_flight=2) as engine:
        request = Request(engine.new_request_id(), [1, 2, 3], SequenceParams(max_total_tokens=23))
        sink = PlanCountingSink(request)
        engine.submit(request, sink)
        await sink.check()
    # The n-th token is the result of plan n; no plan follows the last two.
    assert sink.num_plans == [(n, min(n + 2, 20)) for n in range(1, 21)]


async def test_oldest_waiting_s_is_the_age_of_the_oldest_queued_request() -> None:
    client = FakeClient()
    async with running_engine(client) as engine:
        assert engine.oldest_waiting_s == 0
        client.is_up = False
        client.lose()
        await until(lambda: engine.state is ServerState.WAITING_FOR_EXECUTOR)
        sinks = [submit(engine, [1]), submit(engine, [2])]
        await asyncio.sleep(0.02)
        assert engine.oldest_waiting_s >= 0.02
        engine.cancel(sinks[0].request.request_id)
        client.is_up = True
        await sinks[1].check()
        assert engine.oldest_waiting_s == 0
        assert len(engine._dispatcher) == 0


async def test_a_request_that_returns_to_the_queue_waits_from_then_on() -> None:
    client = FakeClient()
    async with running_engine(client) as engine:
        sink = submit(engine, [1, 2, 3], 150)
        await sink.first_token.wait()
        client.is_hanging = True
        await asyncio.sleep(0.3)
        client.is_up = False
        client.lose()
        await until(lambda: engine.oldest_waiting_s > 0)
        assert engine.oldest_waiting_s < 0.2
        client.is_hanging, client.is_up = False, True
        await sink.check()


async def test_the_observer_is_called_for_each_plan() -> None:
    plans: list[tuple[int, float]] = []
    client = FakeClient()

    def observe(_: Scheduler, plan: StepPlan, duration_s: float) -> None:
        plans.append((plan.num_tokens, duration_s))

    engine = Engine(client, engine_options(), observe)
    task = asyncio.create_task(engine.run())
    await engine.described()
    await submit(engine, [1, 2, 3], 4).check()
    task.cancel()
    assert [num_tokens for num_tokens, _ in plans] == [3, 1, 1, 1]
    assert all(duration_s > 0 for _, duration_s in plans)


async def test_an_observer_that_raises_does_not_stop_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    calls = count()
    engine = Engine(FakeClient(), engine_options(), on_plan=lambda *_: {}[next(calls)])
    task = asyncio.create_task(engine.run())
    await engine.described()
    await submit(engine, [1, 2, 3], 4).check()
    task.cancel()
    assert next(calls) == 4
    messages = [record.message for record in caplog.records]
    assert messages.count("an observer of plans failed") == 1, "four failures in a row are logged once"


async def test_drain_refuses_new_requests_and_waits_for_the_admitted_ones() -> None:
    async with running_engine(FakeClient()) as engine:
        states: list[ServerState] = []
        engine.on_state_change(states.append)
        sink = submit(engine, [1, 2, 3], 50)
        draining = asyncio.create_task(engine.drain())
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="draining"):
            submit(engine, [1])
        await asyncio.wait_for(draining, 10)
        await sink.check()
        assert states == [ServerState.DRAINING]
