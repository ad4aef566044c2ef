"""Tests that requests survive an executor that is lost, hangs, returns invalid results or comes back smaller."""

import asyncio
from dataclasses import replace
from itertools import count

import pytest

from scheduler.core import (
    ExecutorLost,
    FinishReason,
    StepPlan,
    StepResult,
)
from scheduler.engine.engine import ServerState
from tests.support.scheduler.engine_rig import running_engine, submit
from tests.support.scheduler.fake_client import DESCRIPTION, FakeClient, FakeStream
from tests.support.waiting import until


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

    def alter(result: StepResult) -> StepResult:
        is_valid = next(results) % 7 or client.num_streams > 4
        return result if is_valid else replace(result, token_ids=[token_id] * len(result.token_ids))

    client.alter = alter
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


async def test_an_idle_executor_is_probed_periodically() -> None:
    client = FakeClient()
    async with running_engine(client, step_timeout_s=0.3) as engine:
        await until(lambda: client.num_probes >= 4)
        assert (engine.is_ready, client.num_streams) == (True, 1)


async def test_a_busy_executor_is_not_probed() -> None:
    """Its results show that it works, and an answer would have to wait behind plans."""
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
    messages = [record.message for record in caplog.records if "its request has failed" in record.message]
    assert len(messages) == 1
    assert "a prompt of 100 tokens and up to 120 in all never fit" in messages[0]


async def test_a_pool_with_one_block_less_ends_no_open_ended_request() -> None:
    """Their bound is the whole pool, and an executor that returns rarely finds exactly the same free memory."""
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


async def test_queued_requests_expire_while_there_is_no_executor() -> None:
    client = FakeClient()
    async with running_engine(client) as engine:
        client.is_up = False
        client.lose()
        await until(lambda: engine.state is ServerState.WAITING_FOR_EXECUTOR)
        sink = submit(engine, [1], deadline_s=0.0)
        await asyncio.wait_for(sink.done.wait(), 10)
        assert sink.reasons == {0: FinishReason.DEADLINE}


async def test_a_request_that_kills_every_executor_fails_at_its_sixth_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    poison, num_deaths = [9, 9, 9], 0
    send = FakeStream.send

    async def die_of_poison(stream: FakeStream, plan: StepPlan) -> None:
        nonlocal num_deaths
        await send(stream, plan)
        if any(admission.token_ids[:3] == poison for admission in plan.admissions):
            num_deaths += 1
            stream.end(ExecutorLost("killed"))

    monkeypatch.setattr(FakeStream, "send", die_of_poison)
    async with running_engine(FakeClient()) as engine:
        others = [submit(engine, [i, 2, 3], 30) for i in range(3)]
        killer = submit(engine, poison)
        await asyncio.wait_for(killer.done.wait(), 20)
        assert (killer.reasons, killer.outputs, num_deaths) == ({0: FinishReason.EXECUTORS_LOST}, {}, 6)
        for other in others:
            await other.check()
