"""The closed loop and the records of requests, with scripted senders and a scripted client."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from bench.load import LoadError, RequestRecord, closed_loop, quire_sender
from bench.trace import TraceRequest
from quire.events import Delta, Event, Finished, FinishReason, Started, Usage

TRACE = [TraceRequest((7, index), 3) for index in range(10)]


def record(request: TraceRequest) -> RequestRecord:
    return RequestRecord(0.0, (1.0, 2.0, 4.0), len(request.prompt_token_ids), request.max_tokens)


def test_record_computes_latencies() -> None:
    seen = RequestRecord(sent_s=10.0, arrivals_s=(10.5, 10.75, 11.5), num_prompt_tokens=4, num_output_tokens=6)
    assert seen.ttft_s == 0.5
    assert seen.tpot_s == pytest.approx(1.0 / 5)
    assert seen.itl_s == [0.25, 0.75]
    assert seen.latency_s == 1.5


def test_single_token_has_no_time_per_output_token() -> None:
    seen = RequestRecord(10.0, (10.5,), 4, 1)
    assert seen.tpot_s is None
    assert seen.itl_s == []


@pytest.mark.parametrize("concurrency", [1, 3, 10, 64])
async def test_closed_loop_sends_each_request_once_and_bounds_requests_in_flight(concurrency: int) -> None:
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


async def test_first_error_ends_the_run() -> None:
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
    """A client whose `generate` yields the given events."""

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


async def test_quire_sender_counts_tokens_not_messages() -> None:
    client = FakeClient(
        Started("r", 2, 1),
        Delta(0, "", (1,)),
        Delta(0, "", ()),  # a delta without tokens, as when text is held back
        Delta(0, "ab", (2, 3)),
        Finished(0, FinishReason.LENGTH, Usage(2, 3, 1, 0)),
    )
    seen = await quire_sender(client)(TRACE[0])  # type: ignore[arg-type]  # it has the methods that are used
    assert client.asked == [((7, 0), {"max_tokens": 3, "temperature": 0.0, "ignore_eos": True})]
    assert len(seen.arrivals_s) == 2
    assert (seen.num_prompt_tokens, seen.num_output_tokens, seen.num_cached_tokens) == (2, 3, 1)
    assert seen.sent_s <= seen.arrivals_s[0] <= seen.arrivals_s[1]


async def test_too_few_tokens_are_a_load_error() -> None:
    client = FakeClient(Started("r", 2, 0), Delta(0, "", (1, 2)))
    with pytest.raises(LoadError, match="asked for 3 tokens, got 2"):
        await quire_sender(client)(TRACE[0])  # type: ignore[arg-type]
