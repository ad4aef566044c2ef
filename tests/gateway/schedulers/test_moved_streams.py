"""Streams that are moved because their scheduler drains, and schedulers that leave while something is open."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import pytest

from gateway.schedulers import scheduler as scheduler_module
from gateway.schedulers import schedulers as schedulers_module
from gateway.schedulers import watch as watch_module
from gateway.schedulers.stream import Caller
from quire.errors import DeadlineExceededError
from quire.v1 import generation_pb2 as pb
from quire.v1 import replica_pb2 as replica_pb
from tests.gateway.schedulers.test_reports import ReportRig, load, snapshot
from tests.gateway.schedulers.test_waiting import Bounded
from tests.support.gateway.fake_scheduler import Answer, Failure, FakeScheduler, delta, started
from tests.support.gateway.rig import Rig, content
from tests.support.waiting import until

SERVES = replica_pb.WatchResponse(load=load(state=pb.SERVER_STATE_SERVING))
WAITS = replica_pb.WatchResponse(load=load(state=pb.SERVER_STATE_WAITING_FOR_EXECUTOR))
DRAINS = replica_pb.WatchResponse(load=load(state=pb.SERVER_STATE_DRAINING, moves_streams=True))


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedulers_module, "FOLLOW_INTERVAL_S", 0.01)
    monkeypatch.setattr(schedulers_module, "LEAVE_INTERVAL_S", 0.01)


class Following:
    """Lets a gateway follow the schedulers that are wanted; a context manager."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._connections = {each.address: each for each in rig.config.connections(None)}
        self.wanted = set(self._connections)

    async def __aenter__(self) -> Following:
        connections = self._connections
        follow = self._rig.schedulers.follow(lambda: [connections[address] for address in sorted(self.wanted)])
        self._task = asyncio.create_task(follow)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    async def remove(self, fake: FakeScheduler) -> None:
        self.wanted.discard(fake.address)
        await until(lambda: all(each.address != fake.address for each in self._rig.schedulers.all))


def counts(rig: Rig) -> list[int]:
    """Returns the requests that the router counts at each scheduler."""
    return [rig.schedulers._replicas[each.address].num_requests for each in rig.schedulers.all]


async def test_a_stream_that_moves_continues_before_waiting_requests() -> None:
    async with ReportRig(2, routing="round-robin") as rig:
        await rig.watched()
        bounded = [Bounded(fake, 1) for fake in rig.fakes]
        for fake in rig.fakes:
            fake.words_each, fake.step_s = 30, 0.02

        async def send(prompt: str) -> int:
            return (await rig.post("/v1/completions", {"prompt": prompt}))[0]

        streams = [asyncio.create_task(send(f"stream {number}")) for number in range(2)]
        await until(lambda: all(each.num_open for each in bounded))
        streams += [asyncio.create_task(send(f"new {number}")) for number in range(3)]
        await until(lambda: len(rig.schedulers.waiting) == 3)
        (moved,), (other,) = bounded[0].order, bounded[1].order
        bounded[0].most = 0
        rig.report(rig.fakes[0], DRAINS)
        assert await asyncio.gather(*streams) == [200] * 5
        assert bounded[1].order[:2] == [other, moved]


@pytest.mark.parametrize("is_moved", [True, False])
async def test_a_full_queue_at_the_next_scheduler_is_a_pause(is_moved: bool) -> None:
    """All streams of a scheduler move at once, so that queues are full for a moment."""
    async with ReportRig(2) as rig:
        await rig.watched()
        streaming, first, (second,) = await rig.begun(100)
        await asyncio.sleep(0.1)
        words = second.words

        async def full_once(request: pb.GenerateRequest) -> Answer:
            if len(second.opened) == 1:
                raise Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full", retry_after_s=0.1)
            async for message in words(request):
                yield message

        second.answer = full_once
        if is_moved:
            rig.report(first, DRAINS)
        else:
            await first.stop()
        assert content(await streaming) == "".join(f"w{i} " for i in range(100))
        assert len(second.opened) == 2


@pytest.mark.parametrize("num_others", [1, 2])
@pytest.mark.parametrize("is_moved", [True, False])
async def test_a_stream_passes_over_schedulers_with_other_defaults(is_moved: bool, num_others: int) -> None:
    """Replicas have other defaults than each other while an upgrade replaces them one after the other."""
    refusing: set[FakeScheduler] = set()
    async with ReportRig(3) as rig:
        await rig.watched()
        streaming, first, others = await rig.begun(100)
        await asyncio.sleep(0.1)
        for fake in others:

            async def answer(request: pb.GenerateRequest, fake: FakeScheduler = fake) -> Answer:
                if len(refusing) < num_others:
                    refusing.add(fake)
                    raise Failure(grpc.StatusCode.FAILED_PRECONDITION, "the server has other defaults")
                async for message in fake.words(request):
                    yield message

            fake.answer = answer
        if is_moved:
            rig.report(first, DRAINS)
        else:
            await first.stop()
        found = await streaming
        assert [len(fake.opened) for fake in others] == [1, 1]
        assert len(refusing) == num_others
        if num_others == 1:
            assert content(found) == "".join(f"w{i} " for i in range(100))
        else:
            assert "other defaults" in found[-1]["error"]["message"]


async def test_a_stream_moves_again_after_its_first_scheduler_has_left() -> None:
    async with ReportRig(3, can_change=True) as rig:
        await rig.watched()
        async with Following(rig) as following:
            streaming, first, _ = await rig.begun(400)
            rig.report(first, DRAINS)
            await until(lambda: sum(len(fake.opened) for fake in rig.fakes) == 2)
            await following.remove(first)
            await until(lambda: first.address not in rig.schedulers._replicas)
            (second,) = (fake for fake in rig.fakes if fake.opened and fake is not first)
            rig.report(second, DRAINS)
            assert content(await streaming) == "".join(f"w{i} " for i in range(400))


async def test_a_scheduler_that_has_left_can_still_give_its_streams_away() -> None:
    async with ReportRig(2, can_change=True) as rig:
        await rig.watched()
        async with Following(rig) as following:
            streaming, first, (second,) = await rig.begun(400)
            await following.remove(first)
            replicas = rig.schedulers._replicas
            rig.report(first, snapshot("abcd", 50))  # it says that it serves, and is not chosen all the same
            await until(lambda: len(replicas[first.address].view) == 4)
            assert list(replicas.ready()) == [second.address]
            rig.report(first, DRAINS)
            assert content(await streaming) == "".join(f"w{i} " for i in range(400))
            assert len(second.opened) == 1


@pytest.mark.parametrize("num_words", [0, 1])
async def test_a_stream_without_progress_after_its_move_stays_for_a_while(
    monkeypatch: pytest.MonkeyPatch, num_words: int
) -> None:
    """Its request may be what ends executors, with its decodes too: a word comes from the computation of the others.

    Only a scheduler that it does not leave can find that out.
    """
    monkeypatch.setattr(scheduler_module, "MOVE_AFTER_S", 0.05)
    monkeypatch.setattr(scheduler_module, "SUSPECTS_MOVE_AFTER_S", 3.0)

    async def silence(request: pb.GenerateRequest) -> Answer:
        yield started()
        num_received = sum(len(each.token_ids) for each in request.resume.sequences)
        for i in range(num_received, num_received + num_words):
            yield delta(0, f"w{i} ", 10 + i)
        await asyncio.Event().wait()

    async with ReportRig(2) as rig:
        await rig.watched()
        for fake in rig.fakes:
            fake.answer = silence
        suspect, first, (second,) = await rig.begun(400)
        rig.report(first, WAITS)
        await until(lambda: second.opened)
        await asyncio.sleep(0.1)
        for fake in rig.fakes:
            fake.answer = fake.words
        other = asyncio.create_task(rig.events("/v1/completions", {"prompt": "other"}))
        await until(lambda: len(second.opened) == 2)
        rig.report(first, SERVES)
        await until(lambda: all(each.is_ready for each in rig.schedulers.all))
        rig.report(second, WAITS)
        assert content(await other) == content(await suspect) == "".join(f"w{i} " for i in range(400))
        assert [opened.request.text for opened in first.opened] == ["hi", "other", "hi"]


async def test_an_answer_that_comes_after_a_scheduler_has_left_does_not_make_it_ready() -> None:
    async with ReportRig(2, can_change=True, routing="round-robin") as rig:
        await rig.watched()
        for fake in rig.fakes:
            fake.words_each, fake.step_s = 3000, 0.005
        async with Following(rig) as following:
            open_streams = [asyncio.create_task(rig.events("/v1/completions", {"prompt": f"p{i}"})) for i in range(2)]
            await until(lambda: all(fake.opened for fake in rig.fakes))
            leaving = rig.schedulers.all[0]
            (fake,) = (each for each in rig.fakes if each.address == leaving.address)
            has_left, ask = asyncio.Event(), leaving._get_info

            async def late(*arguments: Any, **options: Any) -> Any:
                answer = await ask(*arguments, **options)
                await has_left.wait()
                return answer

            leaving._get_info = late
            models = asyncio.create_task(rig.get("/v1/models"))
            await asyncio.sleep(0.1)
            await following.remove(fake)
            has_left.set()
            assert (await models)[0] == 200
            for each in rig.fakes:
                each.words_each = 3
            assert [(await rig.complete(f"q{i}"))[0] for i in range(4)] == [200] * 4
            for stream in open_streams:
                stream.cancel()
            await asyncio.gather(*open_streams, return_exceptions=True)


async def test_a_deadline_that_passes_during_a_break_leaves_nothing_counted() -> None:
    async with ReportRig(2) as rig:
        await rig.watched()
        for fake in rig.fakes:
            fake.words_each, fake.step_s = 500, 0.01

        async def read(i: int) -> None:
            caller = Caller(deadline_s=time.monotonic() + 0.6)
            stream = await rig.schedulers.open(pb.GenerateRequest(text=f"p{i}"), caller)
            try:
                while await stream.next() is not None:
                    pass
            finally:
                stream.close()

        reading = [asyncio.create_task(read(i)) for i in range(10)]
        await asyncio.sleep(0.2)
        for fake in rig.fakes:
            await fake.stop()
        found = await asyncio.gather(*reading, return_exceptions=True)
        assert {type(each) for each in found} == {DeadlineExceededError}
        assert counts(rig) == [0, 0]


@pytest.mark.parametrize("name", ["traceparent", "tracestate"])
async def test_a_trace_header_that_is_not_ascii_is_ignored_and_leaves_nothing_counted(name: str) -> None:
    body = b'{"model": "tiny", "prompt": "hi"}'
    async with ReportRig(2) as rig:
        await rig.watched()
        host, _, port = rig.server.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
            + f"{name}: ".encode()
            + b"\xff\r\nContent-Length: %d\r\n\r\n" % len(body)
            + body
        )
        answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 200 ")
        await until(lambda: counts(rig) == [0, 0])


async def test_a_scheduler_that_refuses_reports_keeps_its_streams_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway whose key may not observe asks again from time to time."""
    monkeypatch.setattr(watch_module, "REFUSED_RETRY_S", 0.05)
    async with Rig(2, routing="least-loaded") as rig:  # these fakes refuse to be watched
        for fake in rig.fakes:
            fake.words_each, fake.step_s = 10**5, 0.01
        open_streams = [asyncio.create_task(rig.complete(f"p{i}")) for i in range(10)]
        await until(lambda: sum(len(fake.opened) for fake in rig.fakes) == 10)
        for _ in range(20):
            assert sum(counts(rig)) == 10
            await asyncio.sleep(0.02)
        for stream in open_streams:
            stream.cancel()
        await asyncio.gather(*open_streams, return_exceptions=True)


@pytest.mark.parametrize("last", [WAITS, DRAINS])
async def test_streams_do_not_move_from_a_scheduler_that_serves_again_and_reports_no_more(
    monkeypatch: pytest.MonkeyPatch, last: replica_pb.WatchResponse
) -> None:
    """Such as after it was replaced by an older version."""
    monkeypatch.setattr(scheduler_module, "MOVE_AFTER_S", 0.05)
    async with ReportRig(2, routing="round-robin") as rig:
        await rig.watched()
        fake, scheduler = rig.fakes[0], next(s for s in rig.schedulers.all if s.address == rig.fakes[0].address)
        fake.state = last.load.state
        rig.report(fake, last)
        await until(lambda: not scheduler.is_ready)
        await fake.stop()
        fake.state, fake.reports = pb.SERVER_STATE_SERVING, None
        await fake.start()
        await until(lambda: scheduler.is_ready)
        for each in rig.fakes:
            each.words_each, each.step_s = 100, 0.005
        streams = [rig.events("/v1/completions", {"prompt": "hi"}) for _ in range(2)]
        await asyncio.gather(*streams)
        assert [len(each.opened) for each in rig.fakes] == [1, 1]
