"""Closing, leaving or dropping a stream ends its request, also between two tries."""

import asyncio
import gc
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

import quire
from quire import tries
from quire.v1.generation_pb2 import GenerateRequest, GenerateResponse
from tests.support.client.breaks import answer, breaking, forever, unavailable
from tests.support.client.scripted_server import ScriptedServer, endless
from tests.support.waiting import until, wait_until


def test_closing_a_stream_cancels_the_request(server: ScriptedServer) -> None:
    server.script = endless
    with quire.Client(server.address) as client:
        events = client.generate("p")
        assert next(events) == quire.Started("r", 3, 0)
        events.close()
        assert server.saw_cancellation()
        assert list(events) == []
        events.close()


def test_closing_from_another_thread_ends_an_iteration_that_waits(server: ScriptedServer) -> None:
    server.script = endless
    with quire.Client(server.address) as client:
        events = client.generate("p")
        timer = threading.Timer(0.2, events.close)
        timer.start()
        assert len(list(events)) == 2
        timer.join()


def test_leaving_the_with_block_cancels_the_request(server: ScriptedServer) -> None:
    server.script = endless
    with quire.Client(server.address) as client:
        with client.generate("p") as events:
            next(events)
        assert server.saw_cancellation()


def test_dropping_a_stream_cancels_the_request(server: ScriptedServer) -> None:
    server.script = endless
    with quire.Client(server.address) as client:
        for _ in client.generate("p"):
            break
        gc.collect()
        assert server.saw_cancellation()


def test_a_stream_that_ended_is_not_cancelled(server: ScriptedServer) -> None:
    with quire.Client(server.address) as client:
        with client.generate("p") as events:
            list(events)
    assert not server.cancelled.is_set()


async def test_async_close_cancels_and_ends_the_iteration(server: ScriptedServer) -> None:
    server.script = endless
    async with quire.AsyncClient(server.address) as client:
        events = client.generate("p")
        seen = []
        async for event in events:
            seen.append(event)
            if len(seen) == 2:
                # Another task closes it while the iteration waits for the next event.
                asyncio.get_running_loop().call_later(0.05, events.close)
        assert len(seen) == 2
        assert await asyncio.to_thread(server.saw_cancellation)


async def test_async_drop_cancels(server: ScriptedServer) -> None:
    server.script = endless
    async with quire.AsyncClient(server.address) as client:
        async for _ in client.generate("p"):
            break
        gc.collect()
        assert await asyncio.to_thread(server.saw_cancellation)


async def test_cancelling_the_task_cancels_the_request(server: ScriptedServer) -> None:
    server.script = endless
    async with quire.AsyncClient(server.address) as client:
        task = asyncio.create_task(client.complete("p"))
        await until(lambda: len(server.requests) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(server.saw_cancellation)


async def test_closing_the_client_ends_its_requests(server: ScriptedServer) -> None:
    server.script = endless
    client = quire.AsyncClient(server.address)
    task = asyncio.create_task(client.complete("p"))
    await until(lambda: len(server.requests) == 1)
    await client.close()
    with pytest.raises(quire.QuireError):
        await task


@pytest.fixture
def endless_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a wake-up ends a pause."""
    monkeypatch.setattr(tries, "FIRST_PAUSE_S", 3600.0)


def test_closing_a_stream_ends_its_pause(server: ScriptedServer, endless_pauses: None) -> None:
    server.script = breaking(1000, 2, unavailable)
    with quire.Client(server.address) as client:
        events = client.generate("p", n=2)
        closer = threading.Thread(target=lambda: (wait_until(lambda: paused(client)), events.close()))
        closer.start()
        assert len(list(events)) == 2
        closer.join()
        assert not paused(client)
    assert len(server.requests) == 1


def test_closing_the_client_ends_the_pauses_of_its_streams(server: ScriptedServer, endless_pauses: None) -> None:
    server.script = breaking(1000, 2, unavailable)
    client = quire.Client(server.address)
    closer = threading.Thread(target=lambda: (wait_until(lambda: paused(client)), client.close()))
    closer.start()
    with pytest.raises(quire.RequestCancelledError):
        list(client.generate("p", n=2))
    closer.join()
    with pytest.raises(quire.RequestCancelledError):
        client.generate("p")
    assert len(server.requests) == 1


def paused(client: Any) -> set[Any]:
    return set(client._contact._paused)


@pytest.mark.parametrize("how", ["close", "cancel", "client"])
async def test_whatever_ends_an_async_stream_ends_its_pause(
    server: ScriptedServer, endless_pauses: None, how: str
) -> None:
    server.script = breaking(1000, 2, unavailable)
    before = asyncio.all_tasks()
    client = quire.AsyncClient(server.address)
    events = client.generate("p", n=2)

    async def read() -> int:
        return len([event async for event in events])

    task = asyncio.create_task(read())
    await until(lambda: paused(client))
    if how == "close":
        events.close()
        assert await task == 2
    elif how == "cancel":
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [event async for event in events] == []
    else:
        await client.close()
        with pytest.raises(quire.RequestCancelledError):
            await task
    assert not paused(client)
    await client.close()
    await until(lambda: asyncio.all_tasks() == before)
    assert len(server.requests) == 1


async def test_closing_a_continued_stream_cancels_its_request(server: ScriptedServer) -> None:
    fake = answer()

    async def script(request: GenerateRequest, context: Any) -> AsyncIterator[GenerateResponse]:
        responses = fake.stream(request)
        for response in responses[:2]:
            yield response
        if len(server.requests) == 1:
            server.cancelled.clear()
            await unavailable(context)
        await forever(context)

    server.script = script
    async with quire.AsyncClient(server.address) as client:
        async with client.generate("p", n=2) as events:
            for _ in range(3):
                await anext(events)
            server.cancelled.clear()
        assert await asyncio.to_thread(server.saw_cancellation)


def test_a_closed_client_refuses_calls(server: ScriptedServer) -> None:
    client = quire.Client(server.address)
    client.close()
    for call in (lambda: client.generate("p"), client.server_info):
        with pytest.raises(quire.RequestCancelledError, match="closed"):
            call()


async def test_a_closed_async_client_refuses_calls(server: ScriptedServer) -> None:
    client = quire.AsyncClient(server.address)
    await client.close()
    with pytest.raises(quire.RequestCancelledError, match="closed"):
        client.generate("p")
    with pytest.raises(quire.RequestCancelledError, match="closed"):
        await client.server_info()


def test_a_stream_that_its_client_cannot_use_is_cancelled_and_has_no_further_event(server: ScriptedServer) -> None:
    server.script = endless  # of a server that does not know grammars
    with quire.Client(server.address) as client:
        events = client.generate("p", regex="a+")
        with pytest.raises(quire.InternalError, match="grammar"):
            next(events)
        assert server.saw_cancellation()
        assert list(events) == []


async def test_an_async_stream_that_its_client_cannot_use_is_cancelled(server: ScriptedServer) -> None:
    server.script = endless
    async with quire.AsyncClient(server.address) as client:
        events = client.generate("p", regex="a+")
        with pytest.raises(quire.InternalError, match="grammar"):
            await anext(events)
        assert await asyncio.to_thread(server.saw_cancellation)
        assert [event async for event in events] == []


async def test_closing_the_client_ends_a_call_that_waits_for_its_answer() -> None:
    """No task was cancelled, so the error is not CancelledError, which would pass for that."""
    silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    client = quire.AsyncClient(f"127.0.0.1:{silent.sockets[0].getsockname()[1]}")
    call = asyncio.create_task(client.server_info())
    await asyncio.sleep(0.1)
    await client.close()
    with pytest.raises(quire.RequestCancelledError, match="closed"):
        await asyncio.wait_for(call, 30)
    silent.close()
