"""Tests the engine with executors that do not answer, have another model, or describe themselves badly."""

import asyncio
import time
from dataclasses import replace

import pytest

from quire.plan_stream import FEATURES, PROTOCOL_VERSION
from scheduler.core import (
    FinishReason,
    Unavailable,
)
from scheduler.engine.engine import Engine, ServerState
from tests.support.scheduler.engine_rig import engine_options, running_engine, submit
from tests.support.scheduler.fake_client import DESCRIPTION, FakeClient
from tests.support.waiting import until


async def test_requests_expire_while_an_executor_does_not_answer() -> None:
    client = FakeClient()
    async with running_engine(client) as engine:
        client.is_hanging = True
        client.lose()
        await until(lambda: engine.state is ServerState.WAITING_FOR_EXECUTOR)
        num_probes = client.num_probes
        await until(lambda: client.num_probes > num_probes)
        sink = submit(engine, [1], deadline_s=time.monotonic() + 0.1)
        await asyncio.wait_for(sink.done.wait(), 2)
        assert sink.reasons == {0: FinishReason.DEADLINE}


async def test_an_executor_with_another_model_is_refused_and_readiness_gives_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = FakeClient()
    async with running_engine(client, max_backoff_s=0.02) as engine:
        client.description = replace(DESCRIPTION, vocab_size=51, max_model_len=300)
        client.lose()
        sink = submit(engine, [1, 2, 3])
        num_probes = client.num_probes
        await until(lambda: client.num_probes >= num_probes + 4)
        assert engine.state is ServerState.WAITING_FOR_EXECUTOR
        changes = "vocab_size 51, not 50, and max_model_len 300, not 200"
        reason = f"the executor now has {changes}: restart the scheduler to take it"
        assert engine.readiness == f"waiting for executor: {reason}"
        assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [reason]

        client.is_up = False
        await until(lambda: engine.readiness == "waiting for executor")
        client.is_up, client.description = True, replace(DESCRIPTION, device="other")
        await until(lambda: engine.state is ServerState.SERVING)
        assert engine.readiness == "serving"
        assert engine.core is not None
        assert engine.core.state.epoch == 2
        await sink.check()


OTHER_VERSION = f"of the plan stream, this scheduler version {PROTOCOL_VERSION}: run the same release of both"
INVALID_DESCRIPTIONS = pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("vocab_size", 0, "vocab_size 0, where at least 1 is needed"),
        ("max_model_len", 0, "max_model_len 0, where at least 2 is needed"),
        ("max_model_len", 1, "max_model_len 1, where at least 2 is needed"),
        ("block_size", 0, "block_size 0, where at least 1 is needed"),
        ("num_blocks", 0, "num_blocks 0, where at least 2 is needed"),
        ("num_blocks", 1, "num_blocks 1, where at least 2 is needed"),
        ("max_num_seqs", 0, "max_num_seqs 0, where at least 1 is needed"),
        ("max_num_batched_tokens", 0, "max_num_batched_tokens 0, where at least 1 is needed"),
        ("protocol_version", 0, f"it speaks version 1 or older {OTHER_VERSION}"),
        ("protocol_version", PROTOCOL_VERSION + 1, f"it speaks version {PROTOCOL_VERSION + 1} {OTHER_VERSION}"),
        ("features", FEATURES[1:], "it lacks beams: run the same release of both"),
    ],
)


async def test_a_newer_executor_that_speaks_this_version_is_used() -> None:
    newer = replace(DESCRIPTION, protocol_version=PROTOCOL_VERSION + 3, least_protocol_version=PROTOCOL_VERSION)
    async with running_engine(FakeClient(newer)) as engine:
        await submit(engine, [1, 2, 3]).check()


@INVALID_DESCRIPTIONS
async def test_an_executor_with_an_invalid_description_is_asked_again_later(
    field: str, value: object, complaint: str
) -> None:
    client = FakeClient(replace(DESCRIPTION, **{field: value}))
    engine = Engine(client, engine_options(max_backoff_s=0.3))
    running = asyncio.create_task(engine.run())
    await until(lambda: running.done() or (client.num_probes == 1 and engine.readiness != "waiting for executor"))
    assert not running.done()
    reason = f"the executor cannot be used as it describes itself: {complaint}"
    assert engine.readiness == f"waiting for executor: {reason}"
    with pytest.raises(Unavailable):
        submit(engine, [1, 2, 3])
    await asyncio.sleep(0.1)
    assert client.num_probes == 1, "asked again after the shortest pause, not the longest"
    client.description = DESCRIPTION
    await until(lambda: engine.state is ServerState.SERVING)
    await submit(engine, [1, 2, 3]).check()
    running.cancel()


@INVALID_DESCRIPTIONS
async def test_requests_survive_an_executor_with_an_invalid_description(
    field: str, value: object, complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = FakeClient()
    async with running_engine(client, max_backoff_s=0.02) as engine:
        sink = submit(engine, [1, 2, 3])
        await sink.first_token.wait()
        client.description = replace(client.description, **{field: value})
        client.lose()
        num_probes = client.num_probes
        await until(lambda: client.num_probes >= num_probes + 3)
        assert engine.readiness.endswith(complaint)
        (message,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert message.endswith(complaint)
        client.description = replace(DESCRIPTION, device="other")
        await sink.check()


async def test_all_faults_of_a_description_are_reported_together() -> None:
    async with running_engine(client := FakeClient()) as engine:
        client.description = replace(DESCRIPTION, block_size=0, num_blocks=1)
        client.lose()
        both = "block_size 0, where at least 1 is needed, and num_blocks 1, where at least 2 is needed"
        await until(lambda: engine.readiness.endswith(f": {both}"))


async def test_a_lease_that_another_scheduler_holds_is_awaited() -> None:
    """The reason is part of the readiness, requests that run wait, and no plan is sent meanwhile."""
    async with running_engine(client := FakeClient(), max_backoff_s=0.05) as engine:
        sink = submit(engine, [1, 2, 3], max_tokens=50)
        await sink.first_token.wait()
        client.refusal = "the executor serves another scheduler, host a, process 7"
        client.lose()
        num_probes = client.num_probes
        await until(lambda: client.num_probes >= num_probes + 3)
        assert engine.readiness == f"waiting for executor: {client.refusal}"
        assert not sink.done.is_set()
        assert client.num_streams == 1
        client.refusal = ""
        await sink.check()


async def test_requests_with_output_fail_if_the_executor_has_other_weights(caplog: pytest.LogCaptureFixture) -> None:
    client = FakeClient(replace(DESCRIPTION, weights_digest="a", max_num_seqs=1))
    async with running_engine(client, max_backoff_s=0.02) as engine:
        started = submit(engine, [1, 2, 3], max_tokens=100)
        waiting = submit(engine, [4, 5, 6])
        resumed = submit(engine, [7, 8, 9], is_resumed=True)  # no output yet, but its stream has begun elsewhere
        await started.first_token.wait()
        assert not waiting.outputs
        client.description = replace(client.description, weights_digest="b")
        client.lose()
        await waiting.check()
        assert started.reasons == resumed.reasons == {0: FinishReason.MODEL_CHANGED}
        assert "the executor has other weights under the same name" in caplog.text
        await submit(engine, [1, 2, 3]).check()


async def test_requests_with_output_go_on_with_the_same_weights() -> None:
    client = FakeClient(replace(DESCRIPTION, weights_digest="a", incarnation="1"))
    async with running_engine(client, max_backoff_s=0.02) as engine:
        started = submit(engine, [1, 2, 3], max_tokens=100)
        await started.first_token.wait()
        client.description = replace(client.description, incarnation="2")
        client.lose()
        await started.check()
