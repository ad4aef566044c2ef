"""Tests the completions of the prompt box over HTTP."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import aiohttp
import pytest

from scheduler.core import BlockState, InvalidRequest
from scheduler.live import completions
from scheduler.live.completions import read_fields
from tests.support.live.served import Served, body, connections, has_safe_headers, read_messages
from tests.support.scheduler.validator_rig import Unread
from tests.support.waiting import until


def chat(messages: Any) -> dict[str, Any]:
    return {"chat": {"messages": messages}}


def is_idle(served: Served) -> bool:
    found = served.engine.block_map()
    return not found.num_running and not any(block.state is BlockState.ACTIVE for block in found.blocks)


async def test_a_completion_is_streamed(served: Served, session: aiohttp.ClientSession) -> None:
    request = body(request_id="me", sampling={"n": 2, "temperature": 0.5, "seed": None})
    async with session.post(f"{served.url}/live/completions", json=request) as response:
        assert response.status == 200
        assert has_safe_headers(response)
        started, *rest = await read_messages(response)
    assert started["started"]["request_id"] == "me"
    finished = [message["finished"] for message in rest if "finished" in message]
    assert sorted(message["index"] for message in finished) == [0, 1]
    assert {message["usage"]["completion_tokens"] for message in finished} == {20}
    assert "".join(message["delta"]["text"] for message in rest if "delta" in message)


async def test_the_prompt_box_is_told_whether_it_may_send_a_chat(
    served: Served, session: aiohttp.ClientSession
) -> None:
    async with session.get(f"{served.url}/live/prompt") as response:
        assert await response.json() == {"has_chat_template": False}
        assert has_safe_headers(response)


async def test_a_reader_that_reads_nothing_is_disconnected(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "_line", lambda message: b"x" * (1 << 20) + b"\n")
    monkeypatch.setattr(completions, "deliver", partial(stalls, completions.deliver))
    host, _, port = served.http.address.rpartition(":")
    sent = json.dumps(body(max_tokens=200)).encode()
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await asyncio.to_thread(reader.connect, (host, int(port)))
        head = "POST /live/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        reader.sendall(f"{head}Content-Length: {len(sent)}\r\n\r\n".encode() + sent)
        await until(lambda: bool(connections(served)))
        await until(lambda: not connections(served))


async def stalls(deliver: Any, stream: Any, write: Any, timeout_s: float) -> None:
    """Delivers with a short time for readers that read nothing."""
    await deliver(stream, write, 0.3)


async def test_closing_the_connection_frees_the_blocks(served: Served, session: aiohttp.ClientSession) -> None:
    async with session.post(f"{served.url}/live/completions", json=body(max_tokens=380)) as response:
        await response.content.readline()
        served.client.is_hanging = True  # the request is half done and stays so
        await until(lambda: served.engine.core is not None and served.engine.core.num_in_flight == 2)
        response.close()
    core = served.engine.core
    assert core is not None
    await until(lambda: not core.num_unfinished_requests)
    # Plans in flight may still write to its blocks; the executor is lost, and the plans with it.
    served.client.is_hanging = False
    served.client.lose()
    await until(lambda: is_idle(served))


async def test_closing_the_connection_takes_a_request_out_of_the_queue(
    served: Served, session: aiohttp.ClientSession
) -> None:
    """The end of a connection is noticed although nothing is ever written to it."""
    served.client.is_hanging = True
    asking = [
        asyncio.create_task(session.post(f"{served.url}/live/completions", json=body(max_tokens=300)))
        for _ in range(30)
    ]
    core = served.engine.core
    assert core is not None
    await until(lambda: core.num_waiting > 0)
    for task in asking:
        task.cancel()
    for response in await asyncio.gather(*asking, return_exceptions=True):
        if isinstance(response, aiohttp.ClientResponse):  # its headers had arrived
            response.close()
    await until(lambda: not core.num_waiting and not core.num_unfinished_requests)


@pytest.mark.parametrize(
    ("sent", "fields"),
    [
        (body(text=5, max_tokens=-1), {"text", "stopping.max_tokens"}),
        (body(sampling={"temperature": "hot", "n": 0, "top_p": 2}),
         {"sampling.temperature", "sampling.n", "sampling.top_p"}),
        (body(stop="x", sampling={"tempreature": 1}), {"stop", "sampling.tempreature"}),
        (body(sampling=[1]), {"sampling"}),
        (body(stopping={"stop": "x", "ignore_eos": 1}), {"stopping.stop", "stopping.ignore_eos"}),
        (body(sampling={"logit_bias": {"1": 2}}), {"sampling.logit_bias"}),
        (body(request_id="\n"), {"request_id"}),
        (body(structured_output={"regex": "a"}), {"structured_output", "stopping.ignore_eos"}),  # it follows none
        (body(structured_output={"choice": ["a"]}), {"structured_output.choice"}),
        (body(structured_output={"regexp": "a"}), {"structured_output.regexp"}),
        (body(structured_output="a"), {"structured_output"}),
        (chat([{"role": "user", "content": "hello"}]), {"chat"}),  # this model has no template
        (chat("hello"), {"chat.messages"}),
        (chat(["hello"]), {"chat.messages"}),
        (chat([{"role": "user", "text": "hello"}]), {"chat.messages[0].text"}),
        (chat([{"role": 1, "content": ["hello"]}]), {"chat", "chat.messages[0].role", "chat.messages[0].content"}),
        (body(chat={"messages": []}), {"prompt", "chat", "chat.messages"}),
        (body(resume={"continuation": "", "sequences": [{"finished": 10**30}]}),
         {"resume.sequences[0]"}),
        ({}, {"prompt"}),
        ([], {"body"}),
    ],
)  # fmt: skip
async def test_violations_are_reported_by_field(
    served: Served, session: aiohttp.ClientSession, sent: Any, fields: set[str]
) -> None:
    async with session.post(f"{served.url}/live/completions", json=sent) as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"]) == (400, "INVALID_ARGUMENT")
        assert has_safe_headers(response)
    assert {violation["field"] for violation in error["violations"]} == fields
    assert all(violation["problem"] for violation in error["violations"])


async def test_the_size_of_an_error_is_bounded(served: Served, session: aiohttp.ClientSession) -> None:
    keys = {f"{number}": number for number in range(10_000)}
    some = dict.fromkeys(list(keys)[:100], 0)  # a body with 250 of these has few enough values to be read
    many = {"text": "x"}, {"sampling": keys}, {"stopping": keys}, keys, chat([some] * 250), chat([{}] * 10_000)
    for sent in many[1:]:
        async with session.post(f"{served.url}/live/completions", json=many[0] | sent) as response:
            answer = await response.text()
            assert response.status == 400
            assert len(answer) < 10_000
        violations = json.loads(answer)["error"]["violations"]
        assert 1 <= len(violations) <= 64
        assert all(violation["field"] for violation in violations), "the body was refused as a whole"


def test_a_chat_with_too_many_messages_is_not_read() -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_fields(chat(Unread([{}] * 1025)))
    assert refused.value.violations == {"chat.messages": "must be at most 1024, not 1025"}


def test_known_keys_are_found_among_any_number_of_unknown_ones() -> None:
    keys = {f"{'k' * 40}{number}": number for number in range(200)}  # all reported with the same 40 characters
    with pytest.raises(InvalidRequest) as refused:
        read_fields({"text": "x", "sampling": {"n": 2, "seed": None}, **keys})
    assert list(refused.value.violations) == ["k" * 40]
    assert read_fields({"text": "x", "sampling": {"n": 2, "seed": None}}).values == {"text": "x", "sampling.n": 2}


@pytest.mark.parametrize("data", [b"", b"{", b"[" * 60_000, b"\xff", b'{"text": "a" * 3}'])
async def test_a_body_that_is_not_json_is_refused(served: Served, session: aiohttp.ClientSession, data: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    async with session.post(f"{served.url}/live/completions", data=data, headers=headers) as response:
        assert response.status == 400
        error = (await response.json())["error"]
        assert error["message"] == "body: must be JSON"
        assert error["violations"] == [{"field": "body", "problem": "must be JSON"}]


@pytest.mark.parametrize("has_length", [False, True])
async def test_a_body_that_is_too_large_is_refused(
    served: Served, session: aiohttp.ClientSession, has_length: bool
) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(9):
            yield b" " * 2**20

    data = b" " * (9 * 2**20) if has_length else endless()
    headers = {"Content-Type": "application/json"}
    async with session.post(f"{served.url}/live/completions", data=data, headers=headers) as response:
        assert response.status == 400
        assert "at most" in (await response.json())["error"]["message"]


@pytest.mark.parametrize(
    "data", [b"{", b'{"text": "x", "tempreature": 1}', b" " * (2**23 + 1), json.dumps(chat([{}] * 1025)).encode()]
)
async def test_a_request_that_cannot_be_read_is_counted_and_logged_as_refused(
    served: Served, session: aiohttp.ClientSession, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    headers = {"Content-Type": "application/json", "traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
    with caplog.at_level("INFO", "scheduler.requests"):
        async with session.post(f"{served.url}/live/completions", data=data, headers=headers) as response:
            assert response.status == 400
    (record,) = (vars(record) for record in caplog.records if record.name == "scheduler.requests")
    logged = {name: record[name] for name in ("msg", "status", "client", "trace_id")}
    assert logged == {
        "msg": "request refused",
        "status": "invalid_argument",
        "client": "127.0.0.1",
        "trace_id": "a" * 32,
    }
    async with session.get(f"{served.url}/metrics") as response:
        counts = [line for line in (await response.text()).splitlines() if "requests_rejected_total{" in line]
    assert [line for line in counts if 'reason="invalid_argument"' in line and line.endswith(" 1.0")]


async def test_requests_that_never_fit_or_come_while_draining_are_refused(
    served: Served, session: aiohttp.ClientSession
) -> None:
    async with session.post(f"{served.url}/live/completions", json=body(max_tokens=5000)) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (400, "OUT_OF_RANGE")
    await served.engine.drain()
    async with session.post(f"{served.url}/live/completions", json=body()) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (503, "UNAVAILABLE")
