"""Closing, leaving or dropping a stream ends its request."""

import asyncio
import gc
import threading

import pytest

import quire
from tests.support.client.scripted_server import ScriptedServer, endless
from tests.support.waiting import until


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
