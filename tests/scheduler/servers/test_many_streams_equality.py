"""Streams that share a call have the content that they have in calls of their own, in any sequence of actions."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.v1 import generation_pb2 as pb
from scheduler.servers.generation_server import GenerationServer
from scheduler.text.checkpoint import Checkpoint
from tests.scheduler.requests.test_resumed_streams import EOS, REQUESTS, request
from tests.support.scheduler.broken_streams import Messages, Models, OneScheduler, content, resumption
from tests.support.scheduler.many_calls import DirectCall
from tests.support.waiting import until

WHOLE = {name: whole for name, whole in REQUESTS.items() if whole.sampling.HasField("seed") or "beam" in name} | {
    "stop strings": request({"seed": 5, "n": 2}, {"stop": ["a", "e"], "ignore_eos": True, "max_tokens": 20}),
    "not resumable": pb.GenerateRequest(text="hello", sampling={"seed": 8}, stopping={"max_tokens": 9}),
}


@pytest.fixture
async def models(checkpoint: Checkpoint) -> AsyncIterator[Models]:
    models = Models(checkpoint, EOS)
    yield models
    await models.close()


def comparable(messages: Messages) -> dict[str, Any]:
    """Returns the content without the cached tokens, which depend on what ran before."""
    found = content(messages)
    found["started"].request_id = ""
    found["started"].cached_tokens = found["started"].continuation.cached_tokens = 0
    for name, value in found.items():
        if name.startswith("end"):
            value.usage.cached_tokens = 0
    return found


@pytest.fixture
async def expected(models: Models) -> dict[str, Messages]:
    """The messages of each request in a call of its own."""
    async with models.open_scheduler() as scheduler:
        return {name: await scheduler.messages(whole) for name, whole in WHOLE.items()}


def nothing_is_left(scheduler: OneScheduler) -> bool:
    core = scheduler.engine.core
    return not scheduler.intake.open_streams and core is not None and not core.num_unfinished_requests


async def test_all_kinds_of_requests_share_a_call(models: Models, expected: dict[str, Messages]) -> None:
    async with models.open_scheduler() as scheduler:
        call = DirectCall(scheduler.intake)
        for stream_id, whole in enumerate(WHOLE.values()):
            call.open(stream_id, whole)
        await call.finish()
        for stream_id, name in enumerate(WHOLE):
            assert comparable(await call.complete(stream_id)) == comparable(expected[name]), name
        await until(lambda: nothing_is_left(scheduler))


async def test_streams_that_broke_off_go_on_in_a_call(models: Models, expected: dict[str, Messages]) -> None:
    names = [name for name in WHOLE if WHOLE[name].resumable]
    async with models.open_scheduler() as scheduler:
        call = DirectCall(scheduler.intake)
        for stream_id, name in enumerate(names):
            received = expected[name][: len(expected[name]) // 2]
            call.open(stream_id, resumption(WHOLE[name], received))
        await call.finish()
        for stream_id, name in enumerate(names):
            received = expected[name][: len(expected[name]) // 2]
            whole = [*received, *await call.complete(stream_id)]
            started = [message.started for message in whole if message.HasField("started")]
            assert len(started) == (2 if received else 1)
            assert content(whole) == content(expected[name]), name


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["open", "open", "pause", "unpause", "cancel", "slow", "fast", "wait", "wait"]),
        st.integers(0, 40),
        st.integers(0, 30),
    ),
    max_size=60,
)


@given(ACTIONS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_any_sequence_of_actions_loses_and_repeats_nothing(
    models: Models, expected: dict[str, Messages], actions: Any
) -> None:
    """Each stream that is not cancelled ends once, with the content that it has alone, and holds nothing afterwards."""
    names = list(WHOLE)
    async with models.open_scheduler() as scheduler:
        call = DirectCall(scheduler.intake)
        opened: list[str] = []
        cancelled: set[int] = set()
        for action, number, turns in actions:
            stream_id = number % max(1, len(opened) + 1)  # can be unknown
            if action == "open":
                call.open(len(opened), WHOLE[names[number % len(names)]])
                opened.append(names[number % len(names)])
            elif action in ("slow", "fast"):
                call.is_slow = action == "slow"
            elif action == "wait":
                for _ in range(turns):
                    await asyncio.sleep(0)
            else:
                getattr(call, action)(stream_id)
                if action == "cancel" and stream_id < len(opened):
                    cancelled.add(stream_id)
        for stream_id in range(len(opened)):
            call.unpause(stream_id)
        call.is_slow = False
        await call.finish()
        for stream_id, name in enumerate(opened):
            if stream_id not in cancelled:
                assert comparable(await call.complete(stream_id)) == comparable(expected[name])
            elif stream_id in call.ended:  # the cancellation came too late
                assert comparable(call.messages[stream_id]) == comparable(expected[name])
        await until(lambda: nothing_is_left(scheduler))


async def test_the_end_of_a_call_cancels_its_streams(models: Models) -> None:
    long = request(stopping={"max_tokens": 150, "ignore_eos": True})
    async with models.open_scheduler() as scheduler:
        scheduler.client.step_s = 0.002
        call = DirectCall(scheduler.intake)
        for stream_id in range(20):
            call.open(stream_id, long)
        await until(lambda: len(call.messages) > 5)
        call.task.cancel()
        await until(lambda: nothing_is_left(scheduler))
        assert not call.ended
        await until(lambda: scheduler.engine.kv_usage().num_active_blocks == 0, what="all blocks are free")


async def test_server_info_counts_requests_not_sequences(models: Models) -> None:
    long = request({"n": 3}, {"max_tokens": 150, "ignore_eos": True})
    async with models.open_scheduler() as scheduler:
        scheduler.client.step_s = 0.01
        call = DirectCall(scheduler.intake)
        for stream_id in range(20):
            call.open(stream_id, long)
        await until(lambda: len(call.messages) > 2)
        server = GenerationServer(scheduler.engine, scheduler.intake, "fcfs")
        context: Any = None
        info = await server.GetServerInfo(pb.GetServerInfoRequest(), context)
        assert 2 < info.num_running <= 16 // 3
        assert info.num_waiting == 20 - info.num_running
        call.task.cancel()
        await until(lambda: nothing_is_left(scheduler))
