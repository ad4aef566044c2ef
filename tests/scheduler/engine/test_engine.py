"""Tests the events that the engine sends to clients, and how it accepts, cancels and drains requests."""

import asyncio
import time
from collections.abc import Callable
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
    TokenLogprobs,
    Unavailable,
)
from scheduler.engine.engine import Engine, ServerState
from tests.support.core.fake_executor import expected_beams, expected_output
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


async def test_cancelling_releases_the_blocks_and_ends_the_events_of_the_sink() -> None:
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


async def test_a_sample_that_ends_in_the_step_in_which_another_stops_is_reported() -> None:
    """Sample 0 reaches a stop string with its third token, in the step in which sample 1 samples EOS."""
    prompt, params = [1, 2, 3], SequenceParams(max_total_tokens=20)
    first, _ = expected_output(prompt, params, 100, DESCRIPTION.vocab_size)
    outputs = {seed: expected_output(prompt, params, seed, DESCRIPTION.vocab_size)[0] for seed in range(40)}
    seed, eos = next((s, ids[2]) for s, ids in outputs.items() if ids[2] not in (*first[:3], *ids[:2]))
    request = Request(1, prompt, replace(params, eos_token_ids=(eos,)), seeds=(100, seed))

    class Sink(RecordingSink):
        def tokens(self, index: int, token_ids: list[int], logprobs: list[TokenLogprobs] | None = None) -> None:
            super().tokens(index, token_ids, logprobs)
            if index == 0 and len(self.outputs[0]) == 3:
                engine.stop(request.request_id, 0)

    async with running_engine(FakeClient()) as engine:
        sink = Sink(request)
        engine.submit(request, sink)
        await asyncio.wait_for(sink.done.wait(), 10)
        assert sink.reasons == {0: FinishReason.STOP, 1: FinishReason.EOS}
        assert sink.outputs == {0: first[:3], 1: outputs[seed][:3]}


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


async def test_a_broken_sink_ends_only_its_own_request(caplog: pytest.LogCaptureFixture) -> None:
    calls = count()

    class BrokenSink(RecordingSink):
        def tokens(self, index: int, token_ids: list[int], logprobs: list[TokenLogprobs] | None = None) -> None:
            next(calls)
            raise RuntimeError("broken")

    async with running_engine(FakeClient()) as engine:
        broken = Request(engine.new_request_id(), [1], SequenceParams(max_total_tokens=50), seeds=(1, 2))
        engine.submit(broken, BrokenSink(broken))
        await submit(engine, [1, 2, 3], 30).check()
        assert engine.core is not None
        assert not engine.core.has_request(broken.request_id)
    assert next(calls) == 1, "it received an event after it had raised an exception"
    assert ["its sink has failed" in record.message for record in caplog.records if record.levelname == "ERROR"] == [
        True
    ]


async def test_a_sequence_that_a_sink_stops_ends_after_all_sinks_have_been_told() -> None:
    calls: list[tuple[int, str]] = []

    class Sink(RecordingSink):
        def tokens(self, index: int, token_ids: list[int], logprobs: list[TokenLogprobs] | None = None) -> None:
            super().tokens(index, token_ids, logprobs)
            calls.append((self.request.request_id, "tokens"))
            if len(self.outputs[index]) == 2 and self.request.request_id == 1:
                engine.stop(1, index)
                calls.append((1, "stop"))

        def finished(self, index: int, reason: FinishReason, num_preemptions: int, score: float | None = None) -> None:
            super().finished(index, reason, num_preemptions, score)
            calls.append((self.request.request_id, "finished"))

    async with running_engine(FakeClient()) as engine:
        sinks = [Sink(Request(engine.new_request_id(), [i], SequenceParams(max_total_tokens=4))) for i in (7, 8)]
        for sink in sinks:
            engine.submit(sink.request, sink)
        for sink in sinks:
            await asyncio.wait_for(sink.done.wait(), 10)
    first = [(1, "tokens"), (2, "tokens")]
    assert calls[:6] == [*first, (1, "tokens"), (1, "stop"), (2, "tokens"), (1, "finished")]
    assert (sinks[0].reasons, sinks[1].reasons) == ({0: FinishReason.STOP}, {0: FinishReason.LENGTH})


async def test_plans_are_sent_before_the_clients_are_told() -> None:
    """At every token two plans are in flight, because the plan that the result made room for has been sent already."""

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
        lost_s = time.monotonic()
        client.lose()
        await until(lambda: engine.oldest_waiting_s > 0)
        assert engine.oldest_waiting_s <= time.monotonic() - lost_s
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


async def test_an_observer_that_raises_does_not_stop_the_engine(
    caplog: pytest.LogCaptureFixture, counted: Callable[[], dict[str, int]]
) -> None:
    calls = count()
    engine = Engine(FakeClient(), engine_options(), on_plan=lambda *_: {}[next(calls)])
    task = asyncio.create_task(engine.run())
    await engine.described()
    await submit(engine, [1, 2, 3], 4).check()
    task.cancel()
    assert next(calls) == 4
    messages = [record.message for record in caplog.records]
    assert messages.count("an observer of plans failed") == 1, "four failures in a row are logged once"
    assert counted() == {"plan_observer": 4}


async def test_resume_undoes_a_drain_unless_the_process_is_about_to_end() -> None:
    async with running_engine(FakeClient()) as engine:
        await asyncio.wait_for(engine.drain(), 10)
        engine.resume()
        assert engine.state is ServerState.SERVING
        await submit(engine, [1, 2, 3], 4).check()
        await asyncio.wait_for(engine.drain(is_final=True), 10)
        with pytest.raises(Unavailable, match="about to end"):
            engine.resume()
        assert engine.state is ServerState.DRAINING


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
