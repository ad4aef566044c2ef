"""A call of GenerateMany is bounded: slow readers, paused streams, floods, and long messages."""

import asyncio
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
import pytest

from quire.v1 import generation_pb2 as pb
from scheduler.servers import many_streams
from scheduler.telemetry.limits import STALLED_READERS, STREAMS_OF_A_CALL
from tests.support.scheduler.generation_calls import text_request
from tests.support.scheduler.limits import counted
from tests.support.scheduler.many_calls import DirectCall, ManyCall, code_of, many_call, opened, token_ids
from tests.support.scheduler.servers import Servers
from tests.support.waiting import until

Code = grpc.StatusCode


SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]


async def test_a_paused_stream_collects_and_holds_up_no_other(servers: Servers) -> None:
    served = await servers.start()
    async with many_call(served.generation) as call:
        paused, other = await opened(served, call, 1), await opened(served, call, 2)
        await until(lambda: len(call.messages) == 2)
        await call.pause(1)
        await opened(served, call, 3)  # messages are read in order, so the pause was read
        other.emit([70])
        await until(lambda: token_ids(call.messages[2]) == [70])
        for _ in range(100):
            paused.emit([60, 61])
            other.emit([70])
            await asyncio.sleep(0)
        paused.finish()
        other.finish()
        assert token_ids(await call.complete(2)) == [70] * 101
        assert token_ids(call.messages[1]) == []
        await call.unpause(1)
        assert token_ids(await call.complete(1)) == [60, 61] * 100
        assert sum(message.HasField("delta") for message in call.messages[1]) == 1


async def test_a_stream_that_is_paused_for_too_long_ends(servers: Servers) -> None:
    served = await servers.start(stalled_reader_timeout_s=0.2)
    async with many_call(served.generation) as call:
        submitted = await opened(served, call, 1)
        with counted(STALLED_READERS):
            await call.pause(1)
            await call.pause(1)
            ended = await call.end_of(1)
        assert code_of(ended) is Code.RESOURCE_EXHAUSTED
        assert ended.status_details == b"", "not a full queue, which clients may retry"
        await until(lambda: submitted.was_cancelled)
        await served.idle()


async def test_a_pause_that_ends_does_not_end_the_stream(servers: Servers) -> None:
    served = await servers.start(stalled_reader_timeout_s=0.1)
    async with many_call(served.generation) as call:
        submitted = await opened(served, call, 1)
        await call.pause(1)
        await call.unpause(1)
        await asyncio.sleep(0.3)
        submitted.emit([60])
        submitted.finish()
        assert token_ids(await call.complete(1)) == [60]


async def test_a_client_that_reads_nothing_loses_its_call(servers: Servers) -> None:
    served = await servers.start(channel_options=SMALL_WINDOW, stalled_reader_timeout_s=0.3)
    call = ManyCall(served.generation)
    submitted = [await opened(served, call, stream_id) for stream_id in range(4)]
    with counted(STALLED_READERS):
        while submitted[0].is_open:
            for each in submitted:
                each.emit(list(range(60, 110)) * 20)
            await asyncio.sleep(0.001)
        await served.idle()
    assert all(each.was_cancelled for each in submitted)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is Code.RESOURCE_EXHAUSTED


async def test_a_client_that_reads_slowly_gets_all_tokens_and_can_cancel(servers: Servers) -> None:
    served = await servers.start(channel_options=SMALL_WINDOW)
    async with many_call(served.generation) as call:
        call.may_read.clear()
        submitted = [await opened(served, call, stream_id) for stream_id in range(4)]
        for _ in range(400):
            for each in submitted:
                each.emit(list(range(60, 110)))
            await asyncio.sleep(0)
        await call.cancel(3)  # is read, although the server's write is blocked
        await until(lambda: submitted[3].was_cancelled)
        for each in submitted[:3]:
            each.finish()
        call.may_read.set()
        for stream_id in range(3):
            assert token_ids(await call.complete(stream_id)) == list(range(60, 110)) * 400


async def test_a_response_has_a_bounded_size(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    collected = many_streams.ManyStreams._collected

    async def collected_noted(streams: many_streams.ManyStreams) -> pb.GenerateManyResponse:
        response = await collected(streams)
        sizes.append(response.ByteSize())
        return response

    monkeypatch.setattr(many_streams.ManyStreams, "_collected", collected_noted)
    served = await servers.start()
    async with many_call(served.generation) as call:
        submitted = [await opened(served, call, stream_id) for stream_id in range(40)]
        for stream_id in range(40):
            await call.pause(stream_id)
        await call.cancel(39)
        await until(lambda: submitted[39].was_cancelled)
        for each in submitted:
            each.emit(list(range(60, 110)) * 100)
            each.finish()
        for stream_id in range(39):
            await call.unpause(stream_id)
        for stream_id in range(39):
            assert token_ids(await call.complete(stream_id)) == list(range(60, 110)) * 100
    assert max(sizes) < many_streams.MAX_BYTES + 60_000, "the bound and one message"


async def test_output_that_arrives_while_a_message_is_made_is_part_of_the_next(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop goes on between the streams of a message, and no stream is in a message twice."""
    served = await servers.start()
    responses: list[list[tuple[int, list[int]]]] = []
    emitted: list[int] = []  # number of responses at the time
    collect, collected = many_streams.ManyStreams._collect, many_streams.ManyStreams._collected
    async with many_call(served.generation) as call:
        submitted = [await opened(served, call, number) for number in range(3 * many_streams.STREAMS_AT_ONCE)]
        await until(lambda: len(call.messages) == len(submitted))

        def emit_again() -> None:
            emitted.append(len(responses))
            submitted[0].emit([61])

        def collect_noted(streams: many_streams.ManyStreams, max_streams: int, num_bytes: int) -> int:
            if not emitted:
                asyncio.get_running_loop().call_soon(emit_again)
            return collect(streams, max_streams, num_bytes)

        async def collected_noted(streams: many_streams.ManyStreams) -> pb.GenerateManyResponse:
            response = await collected(streams)
            responses.append([(each.stream_id, list(each.response.delta.token_ids)) for each in response.messages])
            return response

        monkeypatch.setattr(many_streams.ManyStreams, "_collect", collect_noted)
        monkeypatch.setattr(many_streams.ManyStreams, "_collected", collected_noted)
        for each in submitted:
            each.emit([60])
        await until(lambda: token_ids(call.messages[0]) == [60, 61])
    assert emitted == [0], "before the first message was complete"
    assert responses == [[(number, [60]) for number in range(len(submitted))], [(0, [61])]]


async def test_log_probabilities_are_sent_in_parts_in_turn_with_other_streams(servers: Servers) -> None:
    served = await servers.start()
    async with many_call(served.generation) as call:
        await call.open(1, text_request(output=pb.OutputParams(logprobs=20)))
        long = (await served.engine.next_request()).start()
        short = await opened(served, call, 2)
        await until(lambda: len(call.messages) == 2)
        await call.pause(1)
        short.emit([70])
        await until(lambda: token_ids(call.messages[2]) == [70])
        long.emit([60] * 3000)
        long.finish()
        await call.unpause(1)
        short.emit([71])
        short.finish()
        assert token_ids(await call.complete(2)) == [70, 71]
        messages = await call.complete(1)
        assert token_ids(messages) == [60] * 3000
        assert sum(len(message.delta.logprobs) for message in messages) == 3000


async def test_streams_beyond_the_number_of_open_ones_are_refused(servers: Servers) -> None:
    served = await servers.start(max_streams=3)
    async with many_call(served.generation) as call:
        for stream_id in range(3):
            await opened(served, call, stream_id)
        await call.open(3, text_request())
        assert code_of(await call.end_of(3)) is Code.RESOURCE_EXHAUSTED
        await call.cancel(0)
        await until(lambda: len(served.intake.open_streams) == 2)
        await opened(served, call, 4)


async def test_streams_of_a_call_are_bounded_before_anything_else(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler.servers.generation_server.MAX_STREAMS", 4)
    served = await servers.start()
    async with many_call(served.generation) as call:
        for stream_id in range(4):
            await opened(served, call, stream_id)
        with counted(STREAMS_OF_A_CALL, 100):
            for stream_id in range(4, 104):
                await call.open(stream_id, text_request())
            for stream_id in range(4, 104):
                assert code_of(await call.end_of(stream_id)) is Code.RESOURCE_EXHAUSTED
        await call.cancel(0)
        await until(lambda: len(served.intake.open_streams) == 3)
        await opened(served, call, 200)


async def test_reading_stops_while_refusals_are_not_read(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a client that opens streams and reads nothing would fill the memory with their ends."""
    monkeypatch.setattr("scheduler.servers.generation_server.MAX_STREAMS", 4)
    calls: list[many_streams.ManyStreams] = []
    serve = many_streams.ManyStreams.serve

    async def serve_blocked(streams: many_streams.ManyStreams, requests: Any, write: Any) -> None:
        calls.append(streams)

        async def write_never(response: pb.GenerateManyResponse) -> None:
            await asyncio.Event().wait()

        await serve(streams, requests, write_never)

    monkeypatch.setattr(many_streams.ManyStreams, "serve", serve_blocked)
    served = await servers.start(stalled_reader_timeout_s=1.0)
    call = ManyCall(served.generation)
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        for stream_id in range(10_000):
            await call.open(stream_id, text_request("x" * 1000))
            assert all(len(streams._streams) <= 8 for streams in calls)
    with pytest.raises(grpc.aio.AioRpcError):
        await call.read()
    assert 0 < stream_id < 9_999, "flow control has stopped the client"
    await served.idle()


async def test_a_flood_of_opened_and_cancelled_streams_leaves_nothing(servers: Servers) -> None:
    served = await servers.start()
    async with many_call(served.generation) as call:
        for stream_id in range(500):
            await call.open(stream_id, text_request("hello fox " * (1 + 300 * (stream_id % 2))))
            await call.cancel(stream_id)
        await call.open(1000, text_request(priority=9))
        while (submitted := await served.engine.next_request()).request.priority != 9:
            pass
        submitted.start().finish()
        await call.complete(1000)
        await served.idle()
    assert not any(submitted.is_open for submitted in served.engine.submitted.values())
    assert served.intake._client_request_ids == {}


async def test_output_that_arrives_between_the_parts_of_a_stream_follows_them(servers: Servers) -> None:
    served = await servers.start()
    call = DirectCall(served.intake)
    call.open(1, text_request(output=pb.OutputParams(logprobs=20)))
    submitted = (await served.engine.next_request()).start()
    await until(lambda: 1 in call.messages)
    call.is_slow = True
    submitted.emit([60] * 3000)  # more than one message of the call holds
    for _ in range(20):
        await asyncio.sleep(0)
    assert token_ids(call.messages[1]) == []
    submitted.emit([61])
    submitted.finish()
    call.is_slow = False
    assert token_ids(await call.complete(1)) == [60] * 3000 + [61]
    await call.finish()
