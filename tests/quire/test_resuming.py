"""Both clients and a server that is lost in the middle of a stream: they continue it, or say why they cannot."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

import quire
from quire import tries
from quire.v1.generation_pb2 import GenerateRequest, GenerateResponse
from tests.support.client.breaks import answer, breaking, dropped, expected, forever, unavailable
from tests.support.client.calls import KINDS, SyncCalls
from tests.support.client.scripted_server import Script, ScriptedServer, delta, finished, refusal, started
from tests.support.e2e.proxy import Proxy


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tries, "FIRST_PAUSE_S", 0.005)
    monkeypatch.setattr(tries, "LONGEST_PAUSE_S", 0.05)


@contextmanager
def restarted(server: ScriptedServer, script: Script) -> Iterator[ScriptedServer]:
    """Ends the server, which breaks its streams, and yields another one at its address."""
    server.stop()
    successor = ScriptedServer()
    successor.script = script
    successor.start(server.address)
    yield successor
    successor.stop()


@KINDS
@pytest.mark.parametrize("num_messages", [0, 1, 2, 3])
@pytest.mark.parametrize("end", [unavailable, dropped])
def test_streams_that_break_again_and_again_give_the_whole_answer(
    server: ScriptedServer, kind: type[SyncCalls], num_messages: int, end: Any
) -> None:
    """With one message there is only a Started in each stream, with two there is something new."""
    server.script = breaking(6, num_messages, end)
    calls = kind(server.address, wait_for_ready=True)
    assert calls.call("complete", "p", n=2) == expected()
    first, *others = [request.HasField("resume") for request in server.requests]
    assert (first, set(others)) == (False, {num_messages > 0})


@KINDS
@pytest.mark.parametrize("num_messages", range(0, 12, 3))
def test_streams_survive_a_connection_that_is_cut(
    server: ScriptedServer, network: Proxy, kind: type[SyncCalls], num_messages: int
) -> None:
    async def cut(context: Any) -> None:
        network.cut()
        await forever(context)

    server.script = breaking(3, num_messages, cut)
    assert kind(network.address).call("complete", "p", n=2) == expected()


@KINDS
def test_streams_survive_a_network_that_is_down_for_a_while(
    server: ScriptedServer, network: Proxy, kind: type[SyncCalls]
) -> None:
    async def refuse(context: Any) -> None:
        network.refuse()
        threading.Timer(0.3, network.accept).start()
        await forever(context)

    server.script = breaking(1, 4, refuse)
    assert kind(network.address).call("complete", "p", n=2) == expected()


@KINDS
def test_streams_survive_a_restart_of_the_server(kind: type[SyncCalls]) -> None:
    """It sends GOAWAY, and ends the streams with UNAVAILABLE."""
    first = ScriptedServer()
    first.start()
    is_waiting = threading.Event()

    async def wait(context: Any) -> None:
        is_waiting.set()
        await forever(context)

    script = breaking(1, 4, wait)
    first.script = script
    completions = []
    thread = threading.Thread(target=lambda: completions.append(kind(first.address).call("complete", "p", n=2)))
    thread.start()
    assert is_waiting.wait(20)
    with restarted(first, script) as second:
        thread.join(60)
        assert completions == [expected()]
        assert len(second.requests) == 1


@KINDS
def test_streams_survive_a_server_that_falls_silent(
    server: ScriptedServer, network: Proxy, kind: type[SyncCalls], set_keepalive: Callable[[int], None]
) -> None:
    set_keepalive(100)

    async def stall(context: Any) -> None:
        network.stall()
        threading.Timer(1.0, network.resume).start()
        await forever(context)

    server.script = breaking(1, 4, stall)
    assert kind(network.address).call("complete", "p", n=2) == expected()


@KINDS
def test_a_break_after_the_last_message_loses_nothing(server: ScriptedServer, kind: type[SyncCalls]) -> None:
    server.script = breaking(1, 1000, unavailable)
    assert kind(server.address).call("complete", "p", n=2) == expected()
    assert [each.finished for each in server.requests[1].resume.sequences] == [True, True]


@KINDS
@pytest.mark.parametrize(
    "code",
    [
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
    ],
)
@pytest.mark.parametrize("num_breaks", [0, 1], ids=["first stream", "continued stream"])
def test_other_errors_are_not_tried_again(
    server: ScriptedServer, kind: type[SyncCalls], code: grpc.StatusCode, num_breaks: int
) -> None:
    async def end(context: Any) -> None:
        is_break = len(server.requests) <= num_breaks
        await context.abort(grpc.StatusCode.UNAVAILABLE if is_break else code, "because")

    server.script = breaking(1000, 3, end)
    with pytest.raises(quire.QuireError, match="because") as raised:
        kind(server.address).events("p", n=2)
    assert raised.value.code == code.name
    assert len(server.requests) == num_breaks + 1


@KINDS
def test_a_full_queue_delays_a_stream_that_broke_off(server: ScriptedServer, kind: type[SyncCalls]) -> None:
    """After a restart of the server, the streams of all clients come back at once."""
    lose, refuse = breaking(1, 3, unavailable), refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry_after_s=0.01)

    async def script(request: GenerateRequest, context: Any) -> AsyncIterator[GenerateResponse]:
        async for response in (refuse if 2 <= len(server.requests) <= 4 else lose)(request, context):
            yield response

    server.script = script
    assert kind(server.address).call("complete", "p", n=2) == expected()
    assert len(server.requests) == 5
    server.script = refuse
    with pytest.raises(quire.QueueFullError, match="full"):
        kind(server.address).events("p", n=2)
    assert len(server.requests) == 6


@KINDS
def test_the_error_after_the_last_try_says_how_long_was_tried(server: ScriptedServer, kind: type[SyncCalls]) -> None:
    async def script(request: GenerateRequest, context: Any) -> AsyncIterator[GenerateResponse]:
        if len(server.requests) == 1:
            yield answer().stream(request)[0]
        await unavailable(context)

    server.script = script
    with pytest.raises(quire.UnavailableError, match=r"the server is draining \(tried again for 0\.[2-9] s\)"):
        kind(server.address, resume_timeout_s=0.2).events("p", n=2)
    assert len(server.requests) > 2


@KINDS
def test_every_server_that_answers_renews_the_time(server: ScriptedServer, kind: type[SyncCalls]) -> None:
    """All breaks together take longer than the bound, which holds for each of them."""

    async def late(context: Any) -> None:
        await asyncio.sleep(0.1)
        await unavailable(context)

    server.script = breaking(7, 1, late)
    assert kind(server.address, resume_timeout_s=0.3).call("complete", "p", n=2) == expected()


@KINDS
def test_a_request_that_always_breaks_off_is_given_up(server: ScriptedServer, kind: type[SyncCalls]) -> None:
    """It may be what ends the server. Progress begins the count again."""
    server.script = breaking(10**6, 1, unavailable)
    with pytest.raises(quire.InternalError, match="21 breaks in a row"):
        kind(server.address).events("p", n=2)
    assert len(server.requests) == 21


def continued_by(num_tokens: int) -> Script:
    """Returns a script that continues two sequences up to 50 tokens each, and breaks off after some of them."""

    async def script(request: GenerateRequest, context: Any) -> AsyncIterator[GenerateResponse]:
        message = started()
        message.started.continuation.seed = 1
        yield message
        received = {each.index: len(each.token_ids) for each in request.resume.sequences}
        for index in (0, 1):
            for _ in range(min(num_tokens, 50 - received.get(index, 0))):
                yield delta(index, "a", 7)
        if received.get(1, 0) + num_tokens < 50:
            await unavailable(context)
        for index in (0, 1):
            yield finished(index)

    return script


@KINDS
def test_a_request_that_breaks_off_after_one_token_is_given_up(server: ScriptedServer, kind: type[SyncCalls]) -> None:
    """Its decodes may be what ends the server: to continue a stream yields one token of each sequence without any."""
    server.script = continued_by(1)
    with pytest.raises(quire.InternalError, match="21 breaks in a row"):
        kind(server.address).events("p", n=2)
    assert len(server.requests) == 21


@KINDS
def test_two_tokens_of_a_sequence_begin_the_count_again(server: ScriptedServer, kind: type[SyncCalls]) -> None:
    server.script = continued_by(2)
    events = kind(server.address).events("p", n=2)
    assert sum(isinstance(event, quire.Delta) for event in events) == 100
    assert len(server.requests) == 25


@KINDS
def test_the_deadline_counts_all_tries(server: ScriptedServer, kind: type[SyncCalls]) -> None:
    server.script = breaking(10**6, 1, unavailable)
    with pytest.raises(quire.DeadlineExceededError):
        kind(server.address, timeout_s=0.3).events("p", n=2)
    remaining = [left_s for left_s in server.time_remaining_s if left_s is not None]
    assert remaining[-1] < remaining[0]


@KINDS
@pytest.mark.parametrize("resume_timeout_s", [0, 60])
def test_a_client_that_must_not_resume_or_cannot_ends_the_stream_at_a_break(
    server: ScriptedServer, kind: type[SyncCalls], resume_timeout_s: float
) -> None:
    """It may resume with the time of 60 s, but the server is older: its Started has no continuation."""

    async def script(request: GenerateRequest, context: Any) -> AsyncIterator[GenerateResponse]:
        yield started()
        yield delta(0, "a", 1)
        await unavailable(context)

    server.script = script
    with pytest.raises(quire.UnavailableError, match=r"^the server is draining$"):
        kind(server.address, resume_timeout_s=resume_timeout_s).events("p")
    assert [request.resumable for request in server.requests] == [resume_timeout_s > 0]


@pytest.mark.parametrize("timeout_s", [-1.0, float("nan")])
@pytest.mark.parametrize("client", [quire.Client, quire.AsyncClient])
async def test_a_time_that_makes_no_sense_is_refused(client: Any, timeout_s: float) -> None:
    with pytest.raises(ValueError, match="resume_timeout_s"):
        client(resume_timeout_s=timeout_s)


def refusing_first(num_refused: int) -> Script:
    """Returns a script that refuses the first requests and answers the others."""
    return breaking(num_refused, 0, unavailable)


def test_a_client_waits_for_a_server_that_it_knows(server: ScriptedServer) -> None:
    """A server that never answered is an error at once, one that answered before is expected back."""
    with quire.Client(server.address) as client:
        server.script = refusing_first(2)
        with pytest.raises(quire.UnavailableError, match=r"^the server is draining$"):
            client.complete("p", n=2)
        with pytest.raises(quire.UnavailableError):
            client.complete("p", n=2)
        assert client.complete("p", n=2) == expected()
        assert client.num_resumptions == 0
        server.script = refusing_first(2)
        assert client.complete("p", n=2) == expected()
        assert client.num_resumptions == 1


async def test_an_async_client_waits_for_a_server_that_it_knows(server: ScriptedServer) -> None:
    async with quire.AsyncClient(server.address) as client:
        server.script = refusing_first(1)
        with pytest.raises(quire.UnavailableError, match=r"^the server is draining$"):
            await client.complete("p", n=2)
        assert await client.complete("p", n=2) == expected()
        server.script = breaking(3, 3, unavailable)
        assert await client.complete("p", n=2) == expected()
        assert client.num_resumptions == 3
