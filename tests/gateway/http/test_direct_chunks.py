"""Chunks that are written when their message arrives: the same text in the same order, for every kind of client."""

import asyncio
import json
from typing import Any

import pytest

from gateway.api import chat_answer
from gateway.http import generation
from gateway.http.reader import Reader
from quire.v1 import generation_pb2 as pb
from tests.support.gateway.fake_scheduler import Answer, delta, finished, started
from tests.support.gateway.rig import CHAT, Rig, content, parsed_events
from tests.support.waiting import until

NUM_WORDS = 400
LONG = "x" * 5_000
TEXT = "".join(f"w{i} {LONG}" for i in range(NUM_WORDS))


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that were written without a task."""
    texts: list[str] = []
    write_now = Reader.write_now

    def spy(reader: Reader, text: str) -> None:
        texts.append(text)
        write_now(reader, text)

    monkeypatch.setattr(Reader, "write_now", spy)
    return texts


async def long_answer(request: pb.GenerateRequest) -> Answer:
    yield started()
    for i in range(NUM_WORDS):
        yield delta(0, f"w{i} {LONG}", i + 1)
        if i % 10 == 0:
            await asyncio.sleep(0.001)
    yield finished(0, NUM_WORDS)


async def raw_answer(rig: Rig, version: str, *, pause_s: float = 0.0) -> tuple[str, bytes]:
    """Returns the header and the body of a streamed chat, read by a client that pauses after each piece."""
    host, port = rig.server.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=2**12)
    body = json.dumps(CHAT | {"stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/{version}\r\nHost: x\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    data = b""
    async with asyncio.timeout(30):
        while piece := await reader.read(2**17):
            data += piece
            await asyncio.sleep(pause_s)
    writer.close()
    header, _, rest = data.partition(b"\r\n\r\n")
    return header.decode().lower(), rest


def dechunked(data: bytes) -> bytes:
    """Returns a body in chunks, each of which must be as long as it says."""
    found = b""
    while True:
        size, _, data = data.partition(b"\r\n")
        if not (length := int(size, 16)):
            assert data == b"\r\n"
            return found
        found += data[:length]
        assert data[length : length + 2] == b"\r\n"
        data = data[length + 2 :]


async def test_most_chunks_are_written_without_a_task(written: list[str]) -> None:
    async with Rig() as rig:
        rig.fake.words_each = 50
        events = await rig.events("/v1/chat/completions", CHAT)
    assert content(events) == "".join(f"w{i} " for i in range(50))
    assert len(written) > 40


@pytest.mark.parametrize("pause_s", [0.0, 0.01])
async def test_a_slow_reader_gets_every_chunk_in_order(written: list[str], pause_s: float) -> None:
    """Its chunks change between both ways whenever its buffers are full."""
    async with Rig() as rig:
        rig.fake.answer = long_answer
        header, body = await raw_answer(rig, "1.1", pause_s=pause_s)
    assert "transfer-encoding: chunked" in header
    events = parsed_events(dechunked(body).decode())
    assert content(events) == TEXT
    assert events[-1] == "[DONE]"
    assert written


async def test_a_client_of_http_1_0_gets_no_chunked_encoding(written: list[str]) -> None:
    async with Rig() as rig:
        rig.fake.answer = long_answer
        header, body = await raw_answer(rig, "1.0")
    assert "transfer-encoding" not in header
    assert content(parsed_events(body.decode())) == TEXT
    assert not written


async def test_choices_of_several_prompts_arrive_whole() -> None:
    async with Rig() as rig:
        rig.fake.words_each = 40
        body = {"model": CHAT["model"], "prompt": ["a", "b", "c"], "n": 2}
        events = await rig.events("/v1/completions", body)
    text = "".join(f"w{i} " for i in range(40))
    for index in range(6):
        found = [c["text"] for e in events[:-1] for c in e["choices"] if c["index"] == index]
        assert "".join(found) == text


async def test_a_bug_in_a_chunk_ends_its_own_stream_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = chat_answer.ChatChunks.encode

    def broken(chunks: Any, prompt: int, message: pb.GenerateResponse) -> str:
        if message.delta.text == "w20 " and chunks._start == marked[0]._start:
            raise RuntimeError("a bug")
        if not marked:
            marked.append(chunks)
        return encode(chunks, prompt, message)

    marked: list[Any] = []
    monkeypatch.setattr(chat_answer.ChatChunks, "encode", broken)
    async with Rig() as rig:
        rig.fake.words_each = 40
        first = asyncio.create_task(rig.events("/v1/chat/completions", CHAT))
        await until(lambda: marked)
        second = await rig.events("/v1/chat/completions", CHAT)
        assert (await first)[-1]["error"]["message"].startswith("internal error")
        assert content(second) == "".join(f"w{i} " for i in range(40))
        await until(lambda: not rig.schedulers.all[0].call.num_streams)


async def test_a_client_that_goes_away_in_the_middle_cancels_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The write finds the connection closed before the handler is cancelled."""

    def gone(reader: Reader, text: str) -> None:
        raise ConnectionResetError("the client has gone")

    monkeypatch.setattr(generation.Reader, "write_now", gone)
    async with Rig() as rig:
        rig.fake.words_each = 10_000
        host, port = rig.server.address.split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps(CHAT | {"stream": True}).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writer.write(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await until(lambda: rig.fake.cancelled == [1])
        _, page = await rig.get("/metrics")
        assert "quire_gateway_disconnects_total 1.0" in page
        writer.close()
