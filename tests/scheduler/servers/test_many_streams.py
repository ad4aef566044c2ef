"""Many requests on one call of GenerateMany, over real gRPC, with an engine whose tokens the tests write."""

import logging

import grpc
import grpc.aio
import pytest

from tests.support.scheduler.generation_calls import text_request
from tests.support.scheduler.many_calls import ManyCall, code_of, many_call, opened, token_ids
from tests.support.scheduler.servers import Servers
from tests.support.waiting import until

Code = grpc.StatusCode


async def test_streams_of_a_call_are_independent(servers: Servers) -> None:
    served = await servers.start()
    async with many_call(served.generation) as call:
        first, second = await opened(served, call, 0), await opened(served, call, 2**64 - 1)
        second.emit([60, 61])
        second.finish()
        assert token_ids(await call.complete(2**64 - 1)) == [60, 61]
        assert 0 not in call.ended
        first.emit([62])
        first.finish()
        assert token_ids(await call.complete(0)) == [62]
        await served.idle()


async def test_one_response_has_the_messages_of_all_streams(servers: Servers) -> None:
    served = await servers.start()
    async with many_call(served.generation) as call:
        submitted = [await opened(served, call, stream_id) for stream_id in range(50)]
        await until(lambda: len(call.messages) == 50)
        before = call.num_responses
        for token_id in (60, 61, 62):
            for each in submitted:
                each.emit([token_id])
        await until(lambda: all(token_ids(messages) == [60, 61, 62] for messages in call.messages.values()))
        assert call.num_responses == before + 1


async def test_a_number_can_be_used_again(servers: Servers) -> None:
    served = await servers.start()
    async with many_call(served.generation) as call:
        (await opened(served, call, 1)).finish()
        await call.complete(1)
        call.messages.clear()
        call.ended.clear()
        cancelled = await opened(served, call, 1)
        await call.cancel(1)
        submitted = await opened(served, call, 1)
        assert cancelled.was_cancelled
        submitted.emit([60])
        submitted.finish()
        assert token_ids(await call.complete(1)) == [60]


async def test_a_cancelled_stream_is_silent_and_frees_its_place(servers: Servers) -> None:
    served = await servers.start()
    async with many_call(served.generation) as call:
        for state in ("queued", "started", "streaming", "paused"):
            await call.open(1, text_request())
            submitted = await served.engine.next_request()
            if state != "queued":
                submitted.start()
            if state == "streaming":
                submitted.emit([60])
            if state == "paused":
                await call.pause(1)
            await call.cancel(1)
            await served.idle()
            assert submitted.was_cancelled, state
            assert not call.ended
    assert served.intake._client_request_ids == {}


async def test_a_client_that_sends_no_more_requests_gets_the_rest(servers: Servers) -> None:
    served = await servers.start()
    call = ManyCall(served.generation)
    submitted = await opened(served, call, 1)
    await call.call.done_writing()
    submitted.emit([60])
    submitted.finish()
    await call.read()
    assert token_ids(call.messages[1]) == [60]
    assert await call.call.code() is Code.OK


async def test_the_end_of_the_connection_cancels_all_streams(servers: Servers) -> None:
    served = await servers.start()
    async with many_call(served.generation) as call:
        for stream_id in range(5):
            await opened(served, call, stream_id)
        await served.channel.close()
        await served.idle()
    assert all(submitted.was_cancelled for submitted in served.engine.submitted.values())


async def test_the_deadline_is_that_of_the_stream(servers: Servers) -> None:
    served = await servers.start()
    async with many_call(served.generation) as call:
        submitted = await opened(served, call, 1, timeout_ms=60_000)
        assert submitted.request.deadline_s is not None
        assert (await opened(served, call, 2)).request.deadline_s is None


async def test_a_stream_whose_output_is_not_taken_ends_after_its_deadline(servers: Servers) -> None:
    served = await servers.start()
    async with many_call(served.generation) as call:
        submitted = await opened(served, call, 1, timeout_ms=200)
        await call.pause(1)
        assert code_of(await call.end_of(1)) is Code.DEADLINE_EXCEEDED
        assert submitted.was_cancelled
        await served.idle()


async def test_a_deadline_that_has_passed_ends_the_stream(servers: Servers) -> None:
    served = await servers.start()
    async with many_call(served.generation) as call:
        await call.open(1, text_request("hello fox " * 3000), timeout_ms=0)  # long enough for a thread
        assert code_of(await call.end_of(1)) is Code.DEADLINE_EXCEEDED
        await served.idle()


async def test_client_and_trace_are_in_the_log(servers: Servers, caplog: pytest.LogCaptureFixture) -> None:
    served = await servers.start()
    trace = "0af7651916cd43dd8448eb211c80319c"
    with caplog.at_level(logging.INFO, "scheduler.requests"):
        async with many_call(served.generation) as call:
            for stream_id, client in ((1, "192.0.2.7\n"), (2, "")):
                traceparent = f"00-{trace}-b7ad6b7169203331-01"
                (await opened(served, call, stream_id, client=client, traceparent=traceparent)).finish()
                await call.complete(stream_id)
            await served.idle()
    lines = [vars(record) for record in caplog.records if record.getMessage() == "request ended"]
    assert [line["trace_id"] for line in lines] == [trace, trace]
    assert lines[0]["client"] == "192.0.2.7\\n"
    assert lines[1]["client"].startswith(("ipv4:127.0.0.1", "ipv6:"))
