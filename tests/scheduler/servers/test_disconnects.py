"""Clients of the public service that disconnect, that share a request id, and that read slowly or not at all."""

import asyncio
import time

import grpc
import grpc.aio
import pytest
from tokenizers import Tokenizer as FastTokenizer

from quire import LimitExceededError
from quire.status import from_rpc_error
from quire.v1 import generation_pb2 as pb
from tests.support.scheduler.generation_calls import collect, failure, text_request
from tests.support.scheduler.servers import Servers
from tests.support.waiting import until

Code = grpc.StatusCode


async def test_request_of_a_disconnected_client_is_cancelled(servers: Servers) -> None:
    served = await servers.start()
    for state in ("queued", "started", "streaming"):
        call = served.generation.Generate(text_request())
        submitted = await served.engine.next_request()
        if state != "queued":
            submitted.start()
            await call.read()
        if state == "streaming":
            submitted.emit([60, 61])
            await call.read()
        call.cancel()
        await served.idle()
        assert submitted.was_cancelled, state


async def test_closed_connection_cancels_all_its_requests(servers: Servers) -> None:
    served = await servers.start()
    calls = []
    for _ in range(5):
        calls.append(served.generation.Generate(text_request()))
        (await served.engine.next_request()).start()
    await served.channel.close()
    await served.idle()
    assert all(submitted.was_cancelled for submitted in served.engine.submitted.values())


async def test_many_disconnects_leave_nothing_behind(servers: Servers) -> None:
    """Clients disconnect after different numbers of loop turns, in any state of their request."""
    served = await servers.start()
    for i in range(60):
        call = served.generation.Generate(text_request("hello fox " * (1 + 300 * (i % 2))))
        for _ in range(i % 12):
            await asyncio.sleep(0.0005)
        call.cancel()
    await asyncio.sleep(0.05)
    await served.idle()
    assert not any(submitted.is_open for submitted in served.engine.submitted.values())
    assert served.intake._client_request_ids == {}


async def test_deadline_is_passed_to_the_engine(servers: Servers) -> None:
    served = await servers.start()
    call = served.generation.Generate(text_request(), timeout=30.0)
    submitted = await served.engine.next_request()
    assert submitted.request.deadline_s is not None
    assert abs(submitted.request.deadline_s - time.monotonic() - 30.0) < 30.0  # a reading of that clock
    call.cancel()


async def test_expired_deadline_ends_the_request(servers: Servers) -> None:
    served = await servers.start()
    error = await failure(served, text_request(), timeout=0.05)
    assert error.code() is Code.DEADLINE_EXCEEDED
    await served.idle()
    assert not any(submitted.is_open for submitted in served.engine.submitted.values())


async def test_clients_may_use_the_same_request_id(servers: Servers) -> None:
    served = await servers.start()
    calls, submitted = [], []
    for _ in range(2):
        calls.append(served.generation.Generate(text_request(request_id="same")))
        submitted.append(await served.engine.next_request())
    assert submitted[0].request.request_id != submitted[1].request.request_id
    calls[0].cancel()
    await until(lambda: submitted[0].was_cancelled)
    submitted[1].start().emit([60])
    submitted[1].finish()
    messages = await collect(calls[1])
    assert messages[0].started.request_id == "same"
    assert messages[-1].HasField("finished")
    assert not submitted[1].was_cancelled


async def test_stop_string_ends_the_sequence_in_the_engine(servers: Servers, byte_level: FastTokenizer) -> None:
    served = await servers.start()
    call = served.generation.Generate(text_request(stopping=pb.StoppingParams(stop=["fox"])))
    submitted = (await served.engine.next_request()).start()
    submitted.emit(byte_level.encode("the fox runs on and on", add_special_tokens=False).ids)
    messages = await collect(call)
    assert submitted.stopped == [0]
    assert "".join(m.delta.text for m in messages if m.HasField("delta")) == "the "
    assert messages[-1].finished.reason == pb.FINISH_REASON_STOP


# --- slow readers -----------------------------------------------------------------------------------------------------

SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]


async def test_slow_reader_gets_fewer_messages_and_all_tokens(servers: Servers) -> None:
    served = await servers.start(channel_options=SMALL_WINDOW)
    call = served.generation.Generate(text_request())
    submitted = (await served.engine.next_request()).start()
    token_ids = list(range(60, 110)) * 400
    for start in range(0, len(token_ids), 50):  # the client reads nothing meanwhile
        submitted.emit(token_ids[start : start + 50])
        await asyncio.sleep(0)
    submitted.finish()
    messages = await collect(call)
    assert [i for m in messages if m.HasField("delta") for i in m.delta.token_ids] == token_ids
    assert len(messages) < len(token_ids) / 10


async def test_client_that_reads_nothing_loses_its_stream(servers: Servers) -> None:
    served = await servers.start(channel_options=SMALL_WINDOW, stalled_reader_timeout_s=0.2)
    call = served.generation.Generate(text_request())
    submitted = (await served.engine.next_request()).start()
    while submitted.is_open:
        submitted.emit(list(range(60, 110)) * 20)
        await asyncio.sleep(0.001)
    assert submitted.was_cancelled
    await served.idle()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    assert caught.value.code() is Code.RESOURCE_EXHAUSTED
    assert type(from_rpc_error(caught.value)) is LimitExceededError, "not a full queue, which clients may retry"


async def test_stream_that_waits_for_tokens_is_not_stalled(servers: Servers) -> None:
    served = await servers.start(stalled_reader_timeout_s=0.05)
    call = served.generation.Generate(text_request())
    submitted = (await served.engine.next_request()).start()
    await asyncio.sleep(0.2)
    submitted.emit([60])
    submitted.finish()
    assert (await collect(call))[-1].HasField("finished")


async def test_number_of_open_streams_is_limited(servers: Servers) -> None:
    served = await servers.start(max_streams=2)
    calls = [served.generation.Generate(text_request()) for _ in range(2)]
    for _ in calls:
        await served.engine.next_request()
    error = await failure(served, text_request())
    assert error.code() is Code.RESOURCE_EXHAUSTED
    calls[0].cancel()
    await until(lambda: len(served.intake.open_streams) == 1)
    call = served.generation.Generate(text_request())
    (await served.engine.next_request()).start().finish()
    assert (await collect(call))[-1].HasField("finished")
