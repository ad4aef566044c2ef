"""Clients that do not read their answer are dropped, whatever kind of answer it is."""

from typing import Any

import pytest
from aiohttp import web

from gateway.http.reader import Reader
from quire.http.slow_readers import SlowReaders
from quire.v1 import generation_pb2 as pb
from tests.gateway.http.test_clients import raw_chat
from tests.support.gateway.fake_scheduler import Answer, delta, finished, started
from tests.support.gateway.rig import Rig
from tests.support.waiting import until


async def large(request: pb.GenerateRequest) -> Answer:
    yield started()
    for _ in range(16):
        yield delta(0, "x" * 2**20, 1)  # more than the buffers of the system take
    yield finished(0, 16)


async def test_a_client_that_does_not_read_an_answer_in_one_piece_is_dropped() -> None:
    async with Rig(stalled_reader_timeout_s=0.2) as rig:
        rig.fake.answer = large
        _, writer = await raw_chat(rig)
        connections = rig.server._runner.server.connections
        assert len(connections) == 1
        await until(lambda: not rig.server._runner.server.connections)
        _, page = await rig.get("/metrics")
        assert "quire_gateway_slow_readers_total 1.0" in page
        writer.close()


class Transport:
    """Stands for the connection to a client that reads as the test says."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self.is_aborted = False

    def get_write_buffer_size(self) -> int:
        return self.num_waiting

    def abort(self) -> None:
        self.is_aborted = True


class Connection:
    """Stands for aiohttp's connection, and for a request on it."""

    def __init__(self) -> None:
        self.transport: Transport | None = Transport()
        self.protocol = self


def look(readers: SlowReaders, connections: list[Any], now_s: float) -> None:
    readers._look(connections, now_s)


def watched() -> tuple[SlowReaders, Any, Transport]:
    """Returns readers with a limit of 10 s that have seen one connection at second 0, and this connection."""
    readers, connection = SlowReaders(10.0, lambda: None), Connection()
    look(readers, [connection], 0.0)
    assert connection.transport is not None
    return readers, connection, connection.transport


@pytest.mark.parametrize(
    ("waiting", "is_dropped"),
    [
        ([50, 50, 50], True),
        ([50, 60, 70], True),  # further answers, which wait too
        ([50, 40, 30], False),
        ([50, 0, 50], False),
        ([0, 0, 0], False),
    ],
)
def test_a_client_is_dropped_if_it_reads_nothing_for_the_time(waiting: list[int], is_dropped: bool) -> None:
    readers, connection, transport = watched()
    for i, transport.num_waiting in enumerate(waiting):
        look(readers, [connection], 6.0 * i)
    assert transport.is_aborted == is_dropped


def test_a_connection_that_aiohttp_has_closed_is_dropped_too() -> None:
    """It stays open while bytes wait for the client."""
    readers, connection, transport = watched()
    transport.num_waiting, connection.transport = 50, None
    look(readers, [connection], 20.0)
    assert transport.is_aborted
    look(readers, [], 21.0)
    assert not readers._progress


def test_bytes_of_a_stream_count_when_a_write_waits_or_the_stream_has_ended() -> None:
    for end in ("blocked", "ended"):
        readers, connection, transport = watched()
        stream = Reader(connection, web.StreamResponse())
        readers.add(stream)
        transport.num_waiting = 50
        look(readers, [connection], 20.0)
        assert not transport.is_aborted
        if end == "blocked":
            stream.is_blocked = True
        else:
            readers.remove(stream)
        look(readers, [connection], 29.0)
        assert not transport.is_aborted
        look(readers, [connection], 31.0)
        assert transport.is_aborted
