"""A failure in a call of GenerateMany ends a stream, or the call, and nothing else."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc.error_details_pb2 import BadRequest, RetryInfo
from google.rpc.status_pb2 import Status

from quire.v1 import generation_pb2 as pb
from scheduler.core import CapacityExceeded, FinishReason, InvariantViolation, QueueFull
from scheduler.engine.engine import ServerState
from scheduler.servers.stream_of_many import StreamOfMany
from scheduler.telemetry.limits import MESSAGE_FIELDS
from tests.scheduler.servers.test_bounded_messages import COSTLY, field
from tests.support.scheduler.fake_engine import FakeEngine
from tests.support.scheduler.generation_calls import text_request
from tests.support.scheduler.limits import counted
from tests.support.scheduler.many_calls import ManyCall, code_of, many_call, opened, status_of_call, token_ids
from tests.support.scheduler.servers import Servers
from tests.support.waiting import until

Code = grpc.StatusCode


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (FinishReason.DEADLINE, Code.DEADLINE_EXCEEDED),
        (FinishReason.CAPACITY, Code.OUT_OF_RANGE),
        (FinishReason.CANCELLED, Code.CANCELLED),
        (FinishReason.NOT_FINITE, Code.INTERNAL),
        (FinishReason.GRAMMAR, Code.INVALID_ARGUMENT),
    ],
)
async def test_a_failure_follows_the_output(servers: Servers, reason: FinishReason, code: grpc.StatusCode) -> None:
    served = await servers.start()
    async with many_call(served.generation) as call:
        submitted = await opened(served, call, 1)
        submitted.emit([60])
        submitted.finish(reason)
        assert code_of(await call.end_of(1)) is code
        assert token_ids(call.messages[1]) == [60]
        await served.idle()


@pytest.mark.parametrize(
    ("refusal", "code"),
    [
        (QueueFull("full", 2.5), Code.RESOURCE_EXHAUSTED),
        (CapacityExceeded("too large"), Code.OUT_OF_RANGE),
        (InvariantViolation("secret"), Code.INTERNAL),
        (ZeroDivisionError("secret"), Code.INTERNAL),
    ],
)
async def test_a_refusal_has_the_status_of_generate(servers: Servers, refusal: Exception, code: Any) -> None:
    served = await servers.start()
    served.engine.refusal = refusal
    async with many_call(served.generation) as call:
        await call.open(1, text_request())
        ended = await call.end_of(1)
        assert code_of(ended) is code
        assert "secret" not in ended.message
        if code is Code.RESOURCE_EXHAUSTED:
            retry = RetryInfo()
            assert Status.FromString(ended.status_details).details[0].Unpack(retry)
            assert retry.retry_delay.ToMilliseconds() == 2500
        served.engine.refusal = None
        (await opened(served, call, 2)).finish()
        await call.complete(2)


async def test_an_invalid_request_ends_its_stream_with_all_violations(servers: Servers) -> None:
    served = await servers.start()
    async with many_call(served.generation) as call:
        await call.open(1)
        await call.open(2, text_request(sampling=pb.SamplingParams(top_p=3.0, min_p=-1.0)))
        await call.open(3, text_request(), client="x" * 257)
        for stream_id, expected in ((1, {"prompt"}), (2, {"sampling.top_p", "sampling.min_p"}), (3, {"client"})):
            ended, bad_request = await call.end_of(stream_id), BadRequest()
            assert code_of(ended) is Code.INVALID_ARGUMENT
            assert Status.FromString(ended.status_details).details[0].Unpack(bad_request)
            assert {violation.field for violation in bad_request.field_violations} == expected
        await served.idle()


async def test_a_draining_server_ends_new_streams_and_finishes_old_ones(servers: Servers) -> None:
    served = await servers.start()
    async with many_call(served.generation) as call:
        submitted = await opened(served, call, 1)
        served.engine.become(ServerState.DRAINING)
        await call.open(2, text_request())
        assert code_of(await call.end_of(2)) is Code.UNAVAILABLE
        submitted.emit([60])
        submitted.finish()
        assert token_ids(await call.complete(1)) == [60]


@pytest.mark.parametrize("last_one", ["ends", "is cancelled"])
async def test_a_server_that_stops_does_not_wait_for_a_call_without_streams(servers: Servers, last_one: str) -> None:
    served = await servers.start()
    call = ManyCall(served.generation)
    submitted = await opened(served, call, 1)
    stopping = asyncio.create_task(served.server.stop(60))
    await asyncio.sleep(0.05)
    assert not stopping.done()
    if last_one == "ends":
        submitted.emit([60])
        submitted.finish()
    else:
        await call.cancel(1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call.read(), 30)
    assert caught.value.code() is Code.UNAVAILABLE
    if last_one == "ends":
        assert token_ids(await call.complete(1)) == [60]
    await asyncio.wait_for(stopping, 30)


async def test_requests_that_break_the_protocol_end_the_call(servers: Servers) -> None:
    served = await servers.start()
    opening = pb.OpenStream(request=text_request())
    twice = pb.GenerateManyRequest(stream_id=7, open=opening)
    for requests, problem in (
        ([twice, twice], "7 is in use"),
        ([pb.GenerateManyRequest(stream_id=7)], "action"),
        ([b""], "action"),
        ([b"\xa2\x06\x00"], "action"),  # of a later version
        ([b"\x12\xff"], "cannot be parsed"),
        ([b"\xff" * 100], "cannot be parsed"),
        ([b"\x0a\x03abc"], "cannot be parsed|action"),  # the type of the stream's number is wrong
    ):
        error = await status_of_call(served, *requests)
        assert error.code() is Code.INVALID_ARGUMENT, requests
        details = error.details() or ""
        assert any(part in details for part in problem.split("|")), details
        assert not details.startswith(":"), "an empty name of a field"
        await served.idle()


async def test_actions_on_unknown_streams_have_no_effect(servers: Servers) -> None:
    served = await servers.start()
    async with many_call(served.generation) as call:
        for stream_id in (1, 2**63):
            await call.pause(stream_id)
            await call.unpause(stream_id)
            await call.cancel(stream_id)
        (await opened(served, call, 1)).finish()
        await call.complete(1)
        await call.pause(1)
        await call.cancel(1)
        (await opened(served, call, 1)).finish()


async def test_a_call_cannot_act_on_the_streams_of_another(servers: Servers) -> None:
    served = await servers.start()
    async with many_call(served.generation) as one, many_call(served.generation) as other:
        mine, theirs = await opened(served, one, 1), await opened(served, other, 1)
        await other.cancel(1)
        await until(lambda: theirs.was_cancelled)
        await other.pause(1)
        mine.emit([60])
        mine.finish()
        assert token_ids(await one.complete(1)) == [60]
        assert set(other.messages) <= {1}
        assert token_ids(other.messages.get(1, [])) == []


@pytest.mark.parametrize("name", ["empty chat messages", "stop strings", "too many ids"])
async def test_a_costly_request_ends_its_stream_only(servers: Servers, name: str) -> None:
    served = await servers.start()
    async with many_call(served.generation) as call:
        (await opened(served, call, 1)).emit([60])
        await until(lambda: 1 in call.messages)
        request = pb.GenerateManyRequest.FromString(b"\x08\x02" + field(2, field(1, COSTLY[name])))
        with counted(MESSAGE_FIELDS):
            await call.call.write(request)
            assert code_of(await call.end_of(2)) is Code.INVALID_ARGUMENT
        assert 1 not in call.ended


async def test_a_costly_request_whose_number_has_more_than_64_bits_ends_the_stream_of_the_low_ones(
    servers: Servers,
) -> None:
    served = await servers.start()
    number = bytes([0x82, *[0x80] * 8, 0x7F])  # 2 + 0x7f · 2⁶³
    with counted(MESSAGE_FIELDS):
        call = served.channel.stream_stream("/quire.v1.Generation/GenerateMany")(metadata=())
        await call.write(b"\x08" + number + field(2, field(1, COSTLY["stop strings"])))
        answer = pb.GenerateManyResponse.FromString(await asyncio.wait_for(call.read(), 30))
        call.cancel()
    (message,) = answer.messages
    assert message.stream_id == 2 + 2**63
    assert code_of(message.ended) is Code.INVALID_ARGUMENT


async def test_a_costly_request_without_a_number_ends_the_call(servers: Servers) -> None:
    served = await servers.start()
    costly = field(2, field(1, COSTLY["stop strings"]))
    assert (await status_of_call(served, costly)).code() is Code.INVALID_ARGUMENT


async def test_a_message_beyond_the_size_that_grpc_accepts_ends_the_call(servers: Servers) -> None:
    served = await servers.start()
    opening = pb.OpenStream(request=text_request("x" * (5 << 20)))
    error = await status_of_call(served, pb.GenerateManyRequest(stream_id=1, open=opening))
    assert error.code() is Code.RESOURCE_EXHAUSTED
    await served.idle()


async def test_before_the_first_executor_streams_are_refused(servers: Servers) -> None:
    served = await servers.start(FakeEngine(model=None))
    async with many_call(served.generation) as call:
        await call.open(1, text_request())
        assert code_of(await call.end_of(1)) is Code.UNAVAILABLE


async def test_a_stream_that_fails_gives_up_its_request_before_its_end_is_written() -> None:
    listed: list[StreamOfMany] = []
    response = pb.GenerateManyResponse()
    stream = StreamOfMany(7, listed.append, lambda stream_id: response.messages.add(stream_id=stream_id))
    stream.fail(QueueFull("full"))
    stream.fail(InvariantViolation("later"))
    assert stream.done.done()
    assert (listed, stream.has_ended) == ([stream], False)
    assert stream.write(1) == response.messages[0].ByteSize()
    assert stream.has_ended
    assert code_of(response.messages[0].ended) is Code.RESOURCE_EXHAUSTED
