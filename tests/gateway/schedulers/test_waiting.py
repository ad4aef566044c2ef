"""Requests wait at the gateway while all schedulers are full."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from gateway.routing.fair_line import Tenant
from gateway.schedulers import waiting as waiting_module
from gateway.schedulers.stream import Caller
from quire.errors import DeadlineExceededError
from quire.v1 import generation_pb2 as pb
from tests.support.gateway.fake_scheduler import Answer, Failure, FakeScheduler
from tests.support.gateway.rig import Rig
from tests.support.waiting import until

if TYPE_CHECKING:
    from quire.v1 import replica_pb2

FULL = Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full", retry_after_s=4)


class Bounded:
    """Makes a fake scheduler refuse requests beyond a number of open ones. `order_of_all` is that of several."""

    def __init__(self, fake: FakeScheduler, most: int, order_of_all: list[str] | None = None) -> None:
        self.most = most
        self.num_open = 0
        self.order: list[str] = []
        self._order_of_all = [] if order_of_all is None else order_of_all
        self._words = fake.words
        fake.answer = self.answer

    async def answer(self, request: pb.GenerateRequest) -> Answer:
        if self.num_open >= self.most:
            raise FULL
        self.num_open += 1
        self.order.append(request.text)
        self._order_of_all.append(request.text)
        try:
            async for message in self._words(request):
                yield message
        finally:
            self.num_open -= 1


class FullRig(Rig):
    """Two schedulers that have room for one request each; a client's key is its tenant."""

    def __init__(self, most: int = 1, **config: Any) -> None:
        super().__init__(2, **config)
        self.weights: dict[str, float] = {}
        self.order: list[str] = []
        self.bounded = [Bounded(fake, most, self.order) for fake in self.fakes]
        for fake in self.fakes:
            fake.words_each, fake.step_s = 5, 0.01
            fake.Identify = self._identify  # type: ignore[method-assign]

    async def _identify(self, request: replica_pb2.IdentifyRequest, context: Any) -> Any:
        from quire.v1 import replica_pb2 as pb2

        return pb2.IdentifyResponse(tenant=request.authorization, weight=self.weights.get(request.authorization, 0.0))

    def let_in(self, number: int) -> None:
        """Gives each scheduler room for this many requests."""
        for bounded in self.bounded:
            bounded.most = number

    async def send(self, tenant: str, number: int = 0, **fields: Any) -> int:
        status, _ = await self.post("/v1/completions", {"prompt": f"{tenant} {number}"} | fields, Authorization=tenant)
        return int(status)


@pytest.fixture(autouse=True)
def short_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_module, "INTERVAL_S", 0.02)


async def test_requests_that_can_wait_are_not_refused() -> None:
    async with FullRig() as rig:
        statuses = await asyncio.gather(*(rig.send("a", i) for i in range(30)))
        assert statuses == [200] * 30
        assert rig.schedulers.waiting.num_waited > 0
        assert len(rig.schedulers.waiting) == 0
        _, page = await rig.get("/metrics")
    assert "quire_gateway_waiting_requests 0.0" in page


async def test_the_line_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_module, "INTERVAL_S", 1000.0)  # a request that is being tried has no place in the line
    async with FullRig(most=0, max_waiting=3, max_wait_s=20.0) as rig:
        sending = [asyncio.create_task(rig.send("a", i)) for i in range(3)]
        await until(lambda: len(rig.schedulers.waiting) == 3)
        async with rig.http.post("/v1/completions", json={"prompt": "x"}, headers={"Authorization": "a"}) as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "1"
        rig.let_in(10)
        rig.schedulers.waiting.wake(3)
        assert [await each for each in sending] == [200] * 3


async def test_a_request_waits_no_longer_than_it_may() -> None:
    async with FullRig(most=0, max_wait_s=0.2) as rig:
        async with rig.http.post("/v1/completions", json={"prompt": "x"}, headers={"Authorization": "a"}) as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "4", "it is told what the schedulers say"
        assert len(rig.schedulers.waiting) == 0


async def test_a_deadline_holds_in_the_line() -> None:
    async with FullRig(most=0) as rig:
        caller = Caller("a", deadline_s=time.monotonic() + 0.2)
        stream = await rig.schedulers.open(pb.GenerateRequest(text="x"), caller)
        with pytest.raises(DeadlineExceededError):
            await stream.next()
        stream.close()
        assert len(rig.schedulers.waiting) == 0


async def test_a_client_that_goes_away_leaves_the_line() -> None:
    async with FullRig(most=0) as rig:
        sending = [asyncio.create_task(rig.send("a", i)) for i in range(2)]
        await until(lambda: len(rig.schedulers.waiting) == 2)
        sending[0].cancel()
        await until(lambda: len(rig.schedulers.waiting) == 1)
        rig.let_in(1)
        assert await sending[1] == 200
        await until(lambda: not any(each.num_open for each in rig.bounded))


async def test_tenants_take_turns() -> None:
    async with FullRig(most=0) as rig:
        flood = [asyncio.create_task(rig.send("flood", i)) for i in range(40)]
        await until(lambda: len(rig.schedulers.waiting) == 40)
        late = [asyncio.create_task(rig.send("late", i)) for i in range(5)]
        await until(lambda: len(rig.schedulers.waiting) == 45)
        rig.let_in(1)
        for each in late:
            assert await each == 200
        num_left = sum(not each.done() for each in flood)
        assert num_left > 15, "five requests of another tenant waited for most of the flood"
        assert [await each for each in flood] == [200] * 40


async def test_a_tenant_with_a_larger_weight_gets_more_turns() -> None:
    async with FullRig(most=0) as rig:
        rig.weights = {"light": 1.0, "heavy": 4.0}
        sending = [asyncio.create_task(rig.send(tenant, i)) for i in range(20) for tenant in ("light", "heavy")]
        await until(lambda: len(rig.schedulers.waiting) == 40)
        rig.let_in(1)
        assert {await each for each in sending} == {200}
        early = [text.split()[0] for text in rig.order[:16]]
        assert early.count("heavy") >= 2 * early.count("light")


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0, 0.0])
async def test_a_weight_that_is_none_counts_as_one(weight: float) -> None:
    async with FullRig() as rig:
        rig.weights["a"] = weight
        assert await rig.schedulers.tenant_of("a") == Tenant("a")


async def test_a_new_request_does_not_overtake(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room again when the second request comes, and the first one has not had its turn."""
    monkeypatch.setattr(waiting_module, "INTERVAL_S", 1000.0)
    async with FullRig(most=0) as rig:
        first = asyncio.create_task(rig.send("a", 1))
        await until(lambda: len(rig.schedulers.waiting) == 1)
        rig.bounded[0].most = 1
        second = asyncio.create_task(rig.send("a", 2))
        await until(lambda: len(rig.schedulers.waiting) == 2)
        rig.schedulers.waiting.wake()
        assert [await first, await second] == [200, 200]
        assert rig.order == ["a 1", "a 2"]


async def test_a_limit_of_the_tenant_is_told_at_once() -> None:
    quota = Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many", retry_after_s=9, is_of_tenant=True)

    async def refuse(request: pb.GenerateRequest) -> Answer:
        raise quota
        yield

    async with FullRig() as rig:
        for fake in rig.fakes:
            fake.answer = refuse
        assert await rig.send("a") == 429
        assert rig.schedulers.waiting.num_waited == 0


async def test_with_one_scheduler_nothing_waits() -> None:
    async with Rig(1) as rig:
        Bounded(rig.fake, 0)
        assert (await rig.complete())[0] == 429
        assert rig.schedulers.waiting.num_waited == 0


async def test_a_turn_of_a_client_that_has_just_gone_goes_to_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tenant pays nothing for a request that was never tried."""
    monkeypatch.setattr(waiting_module, "INTERVAL_S", 1000.0)
    waiting = waiting_module.WaitingRequests(100, 1000)

    async def request(tenant: str, num_tokens: int) -> bool:
        await waiting.enter(Tenant(tenant), num_tokens).turn(None, None)
        return True

    gone = asyncio.create_task(request("a", 5000))
    await asyncio.sleep(0)
    stays = asyncio.create_task(request("b", 1))
    await asyncio.sleep(0.01)
    gone.cancel()
    waiting.wake()  # a stream ends in the same iteration of the event loop
    assert await asyncio.wait_for(stays, 30)
    assert waiting._line._accounts["a"].level == 0.0
    waiting.close()


async def test_streams_that_meet_a_full_queue_pause_between_their_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal frees no room, so it wakes none of the others."""
    monkeypatch.setattr(waiting_module, "INTERVAL_S", 1000.0)
    async with Rig(2, routing="round-robin") as rig:
        for fake in rig.fakes:
            fake.words_each, fake.step_s = 10_000, 0.05

        async def read(text: str) -> None:
            stream = await rig.schedulers.open(pb.GenerateRequest(text=text), Caller())
            while await stream.next() is not None:
                pass

        tasks = [asyncio.create_task(read(str(i))) for i in range(8)]
        first, second = rig.fakes
        await until(lambda: len(first.opened) == len(second.opened) == 4)
        await asyncio.sleep(0.2)

        async def full(request: pb.GenerateRequest) -> Answer:
            raise FULL
            yield  # an asynchronous generator

        second.answer = full
        num_before = len(second.opened)
        await first.stop()
        await until(lambda: len(second.opened) > num_before)
        await asyncio.sleep(1.0)
        assert len(second.opened) - num_before < 40, "four streams that are told to come again after 4 s"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_broken_streams_at_a_limit_of_their_tenant_hold_up_no_other_tenant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waiting_module, "MAX_TRIES", 2)  # at a time, which are fewer than the broken streams
    async with FullRig(most=100, routing="round-robin", max_wait_s=2.0) as rig:
        for fake in rig.fakes:
            fake.words_each, fake.step_s = 10_000, 0.05

        async def read(text: str) -> None:
            stream = await rig.schedulers.open(pb.GenerateRequest(text=text), Caller(text[0]))
            while await stream.next() is not None:
                pass

        tasks = [asyncio.create_task(read(f"a{i}")) for i in range(16)]
        first, second = rig.fakes
        await until(lambda: len(first.opened) == len(second.opened) == 8)
        await asyncio.sleep(0.2)
        num_tries = 0

        async def limited(request: pb.GenerateRequest) -> Answer:
            nonlocal num_tries
            if request.text.startswith("a"):
                num_tries += 1
                code = grpc.StatusCode.RESOURCE_EXHAUSTED
                raise Failure(code, "more than 5 requests a minute", retry_after_s=30, is_of_tenant=True)
            yield pb.GenerateResponse(started=pb.Started(prompt_tokens=3))
            yield pb.GenerateResponse(finished=pb.Finished(reason=pb.FINISH_REASON_EOS))

        second.answer = limited
        await first.stop()
        await until(lambda: num_tries >= 8)
        await asyncio.sleep(0.2)  # they pause now
        assert not any(task.done() for task in tasks)
        await asyncio.wait_for(asyncio.gather(*(read(f"b{i}") for i in range(8))), 30)
        assert num_tries < 40, "eight streams that are told to come again after 30 s"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
