"""The load generator with senders that answer at once, or as a test says."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from bench.load import LoadError, RequestRecord, closed_loop, quire_sender
from bench.openai_peer import peer_sender, peer_session
from bench.trace import TraceRequest
from quire.events import Delta, Event, Finished, FinishReason, Started, Usage

TRACE = [TraceRequest((7, index), 3) for index in range(10)]


def record(request: TraceRequest) -> RequestRecord:
    return RequestRecord(0.0, (1.0, 2.0, 4.0), len(request.prompt_token_ids), request.max_tokens)


def test_latencies_of_a_request() -> None:
    seen = RequestRecord(sent_s=10.0, arrivals_s=(10.5, 10.75, 11.5), num_prompt_tokens=4, num_output_tokens=6)
    assert seen.ttft_s == 0.5
    assert seen.tpot_s == pytest.approx(1.0 / 5)
    assert seen.itl_s == [0.25, 0.75]
    assert seen.latency_s == 1.5


def test_one_token_has_no_time_per_further_token() -> None:
    seen = RequestRecord(10.0, (10.5,), 4, 1)
    assert seen.tpot_s is None
    assert seen.itl_s == []


@pytest.mark.parametrize("concurrency", [1, 3, 10, 64])
async def test_each_request_is_sent_once_by_never_more_clients_than_asked(concurrency: int) -> None:
    sent: list[TraceRequest] = []
    running = most = 0

    async def send(request: TraceRequest) -> RequestRecord:
        nonlocal running, most
        sent.append(request)
        running += 1
        most = max(most, running)
        for _ in range(1 + request.prompt_token_ids[1] % 3):
            await asyncio.sleep(0)
        running -= 1
        return record(request)

    result = await closed_loop(send, TRACE, concurrency)
    assert sent == TRACE
    assert most == min(concurrency, len(TRACE))
    assert len(result.records) == len(TRACE)
    assert result.concurrency == concurrency


async def test_the_first_error_ends_the_run() -> None:
    sent = []

    async def send(request: TraceRequest) -> RequestRecord:
        sent.append(request)
        if len(sent) == 3:
            raise LoadError("no")
        if len(sent) < 3:
            await asyncio.Event().wait()
        return record(request)

    with pytest.raises(LoadError, match="no"):
        await closed_loop(send, TRACE, 3)
    assert len(sent) == 3


class FakeClient:
    """Answers as `AsyncClient.generate` does, with the events it was given."""

    def __init__(self, *events: Event) -> None:
        self.events = events
        self.asked: list[tuple[Any, dict[str, Any]]] = []

    def generate(self, prompt: Any, **options: Any) -> "FakeStream":
        self.asked.append((prompt, options))
        return FakeStream(self.events)


class FakeStream:
    def __init__(self, events: tuple[Event, ...]) -> None:
        self._events = events

    async def __aenter__(self) -> "FakeStream":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def __aiter__(self) -> AsyncIterator[Event]:
        for event in self._events:
            yield event


async def test_quire_is_asked_for_exactly_these_tokens_and_counted_by_tokens() -> None:
    client = FakeClient(
        Started("r", 2, 1),
        Delta(0, "", (1,)),
        Delta(0, "", ()),  # text that was held back brings no token
        Delta(0, "ab", (2, 3)),
        Finished(0, FinishReason.LENGTH, Usage(2, 3, 1, 0)),
    )
    seen = await quire_sender(client)(TRACE[0])  # type: ignore[arg-type]  # a client as far as it is used
    assert client.asked == [((7, 0), {"max_tokens": 3, "temperature": 0.0, "ignore_eos": True})]
    assert len(seen.arrivals_s) == 2
    assert (seen.num_prompt_tokens, seen.num_output_tokens, seen.num_cached_tokens) == (2, 3, 1)
    assert seen.sent_s <= seen.arrivals_s[0] <= seen.arrivals_s[1]


async def test_fewer_tokens_than_asked_for_void_the_run() -> None:
    client = FakeClient(Started("r", 2, 0), Delta(0, "", (1, 2)))
    with pytest.raises(LoadError, match="asked for 3 tokens, got 2"):
        await quire_sender(client)(TRACE[0])  # type: ignore[arg-type]


async def test_the_peer_gets_the_same_request_in_its_own_words() -> None:
    bodies = []

    async def completions(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b': comment\n\ndata: {"choices": [{"text": "a"}]}\n\n')
        await response.write(b'data: {"choices": [{"text": "b"}], "usage": null}\n\n')
        await response.write(b'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\ndata: [DONE]\n\n')
        return response

    async with serving(completions) as url, peer_session() as session:
        seen = await peer_sender(session, url + "/", "toy")(TRACE[0])
    assert len(seen.arrivals_s) == 2
    assert seen.num_output_tokens == 3
    assert bodies == [
        {
            "model": "toy",
            "prompt": [7, 0],
            "max_tokens": 3,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


async def test_a_refusal_of_the_peer_is_an_error_with_its_words() -> None:
    async def completions(request: web.Request) -> web.Response:
        return web.Response(status=404, text="no such model")

    async with serving(completions) as url, peer_session() as session:
        with pytest.raises(LoadError, match="404: no such model"):
            await peer_sender(session, url, "toy")(TRACE[0])


async def test_a_peer_that_is_not_there_is_an_error() -> None:
    async with peer_session() as session:
        with pytest.raises(LoadError, match=r"127\.0\.0\.1:1"):
            await peer_sender(session, "http://127.0.0.1:1", "toy")(TRACE[0])


class serving:  # noqa: N801 - used as a function
    """An HTTP server on a free port, for the length of a block; gives its URL."""

    def __init__(self, handler: Any) -> None:
        application = web.Application()
        application.router.add_post("/v1/completions", handler)
        self._runner = web.AppRunner(application)

    async def __aenter__(self) -> str:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
