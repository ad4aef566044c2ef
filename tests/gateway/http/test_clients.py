"""Clients that go away, read slowly, or send what they should not."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from gateway.http import server
from gateway.http import server as server_bounds
from quire.http import json_bodies, unread_bodies
from quire.v1 import generation_pb2 as pb
from tests.support.gateway.fake_scheduler import MODEL, Answer, delta, finished, started
from tests.support.gateway.rig import CHAT, Rig, content
from tests.support.waiting import until


async def endless(request: pb.GenerateRequest) -> Answer:
    yield started()
    while True:
        yield delta(0, "x" * 20_000, 1)  # so that the buffers of a slow reader fill soon
        await asyncio.sleep(0)


async def silent(request: pb.GenerateRequest) -> Answer:
    yield started()
    await asyncio.sleep(600)


async def raw(rig: Rig, head: str, body: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = rig.server.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=2**16)
    writer.write(head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body)
    return reader, writer


async def raw_chat(rig: Rig, **fields: object) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    body = json.dumps(CHAT | fields).encode()
    head = "POST /v1/chat/completions HTTP/1.1\nHost: x\nContent-Type: application/json\n"
    return await raw(rig, f"{head}Content-Length: {len(body)}", body)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_client_that_goes_away_cancels_its_stream(is_streamed: bool) -> None:
    async with Rig() as rig:
        rig.fake.answer = silent
        _, writer = await raw_chat(rig, stream=is_streamed)
        await until(lambda: rig.fake.opened)
        writer.close()
        await until(lambda: rig.fake.cancelled == [1])
        await until(lambda: not rig.schedulers.all[0].call.num_streams)


async def test_a_slow_reader_is_paused_and_others_do_not_wait() -> None:
    async with Rig() as rig:
        rig.fake.answer = endless
        reader, writer = await raw_chat(rig, stream=True)
        await until(lambda: rig.fake.paused == [1])
        rig.fake.answer = rig.fake.words
        events = await rig.events("/v1/chat/completions", CHAT)  # on the same call
        assert content(events) == "w0 w1 w2 "
        assert rig.fake.num_calls == 1
        while not rig.fake.continued:
            assert await reader.read(2**16)
        writer.close()
        await until(lambda: rig.fake.cancelled == [1])


async def test_a_reader_that_stands_still_is_dropped() -> None:
    async with Rig(stalled_reader_timeout_s=0.2) as rig:
        rig.fake.answer = endless
        _, writer = await raw_chat(rig, stream=True)
        await until(lambda: rig.fake.cancelled == [1])
        _, page = await rig.get("/metrics")
        assert "quire_gateway_slow_readers_total 1.0" in page
        assert "quire_gateway_disconnects_total 0.0" in page
        writer.close()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"nonsense", 400),
        (b"\xff\xfe", 400),
        (b"[" * 100_000, 400),
        (b'{"messages": NaN}', 400),
        (b"[]", 400),
        (b"null", 400),
        (b"5", 400),
        (b'{"messages": "\\ud800"}', 400),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400),
        (b'{"n": ' + b"9" * 5000 + b"}", 400),
        (b"[" + b"{}," * 400_000 + b"{}]", 413),
        (b'"' + b"x" * 2**20 + b'"', 413),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
async def test_bad_bodies(path: str, body: bytes, status: int) -> None:
    async with Rig() as rig:
        async with rig.http.post(path, data=body, headers={"Content-Type": "application/json"}) as response:
            assert response.status == status
            assert set((await response.json())["error"]) == {"message", "type", "param", "code"}
        assert not rig.fake.opened


async def test_a_body_of_unknown_length_is_bounded_too() -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b" " * 2**16

    async with Rig() as rig:
        async with rig.http.post(
            "/v1/completions", data=parts(), headers={"Content-Type": "application/json"}
        ) as response:
            assert response.status == 413


async def test_other_content_types_are_refused() -> None:
    async with Rig() as rig:
        async with rig.http.post("/v1/chat/completions", data=json.dumps(CHAT)) as response:
            assert response.status == 415


async def test_a_body_has_to_arrive_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_bodies, "MAX_BODY_S", 0.1)
    async with Rig() as rig:
        head = "POST /v1/completions HTTP/1.1\nHost: x\nContent-Type: application/json\nContent-Length: 50"
        reader, writer = await raw(rig, head, b"{")
        assert b" 408 " in await asyncio.wait_for(reader.readline(), 20)
        writer.close()


async def test_bodies_that_never_end_keep_ordinary_ones_from_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_HELD_BYTES", 2**18)
    async with Rig() as rig:
        head = "POST /v1/completions HTTP/1.1\nHost: x\nContent-Type: application/json\nContent-Length: 1000000"
        writers = [(await raw(rig, head, b" " * 200_000))[1] for _ in range(6)]
        await until(lambda: len(rig.server.generation.requests) <= 2)  # the others were refused
        assert (await rig.complete())[0] == 200
        for writer in writers:
            writer.close()


async def test_the_rest_of_a_refused_body_is_read_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was read for ten seconds, as fast as it came."""
    monkeypatch.setattr(unread_bodies, "PAUSE_S", 3600.0)
    monkeypatch.setattr(unread_bodies, "DISCARD_S", 3600.0)
    num_bytes = 64 << 20
    async with Rig() as rig:
        head = f"POST /v1/completions HTTP/1.1\nHost: x\nContent-Type: application/json\nContent-Length: {num_bytes}"
        reader, writer = await raw(rig, head)
        writer.write(b" " * num_bytes)
        assert b" 413 " in await asyncio.wait_for(reader.readline(), 20)
        for _ in range(200):
            assert (await rig.get("/health"))[0] == 200
        assert writer.transport.get_write_buffer_size() > num_bytes // 2, "the gateway has read a part only"
        writer.transport.abort()


async def test_silent_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_bounds, "FIRST_REQUEST_S", 0.1)
    async with Rig() as rig:
        host, port = rig.server.address.split(":")
        for start in (b"", b"GET /health HTTP/1.1\r\nHost"):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(start)
            assert await asyncio.wait_for(reader.read(), 20) == b""
            writer.close()
        assert (await rig.get("/health"))[0] == 200


async def test_the_end_of_a_stream_ends_the_connection_of_a_client_that_knows_no_chunks() -> None:
    async with Rig() as rig:
        body = json.dumps(CHAT | {"stream": True}).encode()
        head = "POST /v1/chat/completions HTTP/1.0\nHost: x\nConnection: keep-alive\nContent-Type: application/json\n"
        reader, writer = await raw(rig, f"{head}Content-Length: {len(body)}", body)
        answer = await asyncio.wait_for(reader.read(), 20)
        assert answer.endswith(b"data: [DONE]\n\n")
        writer.close()


async def test_connections_beyond_the_limit_are_closed() -> None:
    async with Rig(max_connections=2) as rig:
        assert (await rig.get("/health"))[0] == 200  # keeps its connection
        _, second = await raw_chat(rig, stream=True)
        await until(lambda: rig.fake.opened)
        host, port = rig.server.address.split(":")
        reader, third = await asyncio.open_connection(host, int(port))
        with suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), 20) == b""
        assert len(rig.server._runner.server.connections) == 2
        second.close()
        third.close()


async def test_requests_beyond_the_limit_are_refused() -> None:
    async with Rig(max_requests=1) as rig:
        rig.fake.answer = silent
        _, writer = await raw_chat(rig, stream=True)
        await until(lambda: rig.fake.opened)
        async with rig.http.post("/v1/chat/completions", json=CHAT) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "1")
        writer.close()
        rig.fake.answer = rig.fake.words
        await until(lambda: rig.fake.cancelled)
        assert (await rig.chat())[0] == 200


async def test_draining_lets_open_streams_end_and_refuses_new_ones() -> None:
    go_on = asyncio.Event()

    async def answer(request: pb.GenerateRequest) -> Answer:
        yield started()
        yield delta(0, "a", 1)
        await go_on.wait()
        yield delta(0, "b", 2)
        yield finished(0, 2)

    async with Rig() as rig:
        rig.fake.answer = answer
        assert (await rig.get("/health"))[0] == 200  # opens a connection, which stays open
        reader, writer = await raw_chat(rig, stream=True)
        await until(lambda: rig.fake.opened)
        stopping = asyncio.create_task(rig.server.stop(30))
        await until(lambda: rig.server.generation.requests.is_draining)
        refused, asking = await raw_chat(rig)  # the open connection is being closed
        answer = (await refused.read()).decode()
        assert answer.startswith("HTTP/1.1 503 ")
        assert '"service_unavailable"' in answer
        asking.close()
        assert (await rig.get("/health"))[0] == 503
        probe, new = await asyncio.open_connection(*rig.server.address.split(":"))
        new.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert b" 200 " in await probe.readline(), "it listens until the end"
        new.close()
        go_on.set()
        text = (await asyncio.wait_for(reader.read(), 30)).decode()
        assert await stopping is True
        assert '"content":"b"' in text
        assert "data: [DONE]" in text
        writer.close()


async def test_draining_closes_connections_so_that_clients_go_to_another_gateway() -> None:
    go_on = asyncio.Event()

    async def answer(request: pb.GenerateRequest) -> Answer:
        await go_on.wait()
        yield started()
        yield delta(0, "b", 1)
        yield finished(0, 1)

    async with Rig() as rig:
        rig.fake.answer = answer
        idle, idle_writer = await raw(rig, "GET /healthz HTTP/1.1\nHost: x")
        assert b" 200 " in await idle.readuntil(b"ok\n")
        new, new_writer = await asyncio.open_connection(*rig.server.address.split(":"))
        new_writer.write(b"GET /healthz HTTP/1.1\r\n")  # the header of its first request has not ended
        reader, writer = await raw_chat(rig)
        streamed, stream_writer = await raw_chat(rig, stream=True)
        await until(lambda: len(rig.fake.opened) == 2)
        stopping = asyncio.create_task(rig.server.stop(30))
        assert await asyncio.wait_for(idle.read(), 20) == b""
        refused, refused_writer = await raw_chat(rig)
        text = await asyncio.wait_for(refused.read(), 20)
        assert b" 503 " in text
        assert b"Connection: close\r\n" in text
        new_writer.write(b"Host: x\r\n\r\n")
        assert b" 200 " in await asyncio.wait_for(new.read(), 20)
        go_on.set()
        text = await asyncio.wait_for(reader.read(), 20)
        assert b" 200 " in text
        assert b"Connection: close\r\n" in text
        assert b"data: [DONE]" in await asyncio.wait_for(streamed.read(), 20)
        assert await stopping is True
        for each in (idle_writer, new_writer, writer, stream_writer, refused_writer):
            each.close()


async def test_a_request_that_arrives_just_before_a_drain_is_answered() -> None:
    async with Rig() as rig:
        reader, writer = await raw(rig, "GET /healthz HTTP/1.1\nHost: x")
        assert b" 200 " in await reader.readuntil(b"ok\n")
        runner = rig.server._runner.server
        assert runner is not None
        (connection,) = runner.connections
        await until(lambda: connection._waiter is not None)
        with rig.server.generation.requests.counted():  # the drain waits for this request
            stopping = asyncio.create_task(rig.server.stop(20))  # begins before the task of the connection is woken
            connection.data_received(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 200 " in await asyncio.wait_for(reader.read(), 20)
        assert await stopping is True
        writer.close()


async def test_a_drain_that_takes_too_long_cancels() -> None:
    async with Rig() as rig:
        rig.fake.answer = silent
        _, writer = await raw_chat(rig, stream=True)
        await until(lambda: rig.fake.opened)
        assert await rig.server.stop(0.1) is False
        await until(lambda: rig.fake.cancelled)
        writer.close()


@pytest.mark.parametrize(
    "head",
    [
        "\x00\x01 garbage",
        "GET /health HTTP/1.1\nHost: x\nContent-Length: 1\nContent-Length: 2",
        f"GET /health HTTP/1.1\nHost: x\nA: {'a' * 10_000}",
    ],
)
async def test_what_is_not_http_is_refused(head: str, caplog: pytest.LogCaptureFixture) -> None:
    """Clients decide how often, and a line would quote their bytes, so the log has none."""
    caplog.set_level(logging.DEBUG)
    async with Rig() as rig:
        reader, writer = await raw(rig, head)
        assert b" 400 " in await asyncio.wait_for(reader.readline(), 20)
        writer.close()
        assert (await rig.complete(model=MODEL))[0] == 200
    assert [each for each in caplog.records if each.name == "aiohttp.server"] == []
