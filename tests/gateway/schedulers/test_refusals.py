"""A request that a scheduler refuses because of its own state goes to the others, once to each."""

import asyncio
import time
from typing import Any

import grpc
import pytest

from gateway.schedulers.stream import Caller
from quire.errors import DeadlineExceededError
from quire.v1 import generation_pb2 as pb
from tests.support.gateway.fake_scheduler import Answer, Failure, FakeScheduler, delta, started
from tests.support.gateway.rig import CHAT, Rig, content
from tests.support.waiting import until

Code = grpc.StatusCode

FULL = Failure(Code.RESOURCE_EXHAUSTED, "full", retry_after_s=4)
DRAINING = Failure(Code.UNAVAILABLE, "the server is draining")
QUOTA = Failure(Code.RESOURCE_EXHAUSTED, "more than 5 requests a minute", retry_after_s=9, is_of_tenant=True)


def refuse(fake: FakeScheduler, failure: Failure, *before: pb.GenerateResponse) -> None:
    async def answer(request: pb.GenerateRequest) -> Answer:
        for message in before:
            yield message
        raise failure

    fake.answer = answer


async def first_choice(rig: Rig) -> FakeScheduler:
    """Returns the scheduler that gets CHAT first, and forgets what the schedulers have got."""
    assert (await rig.chat())[0] == 200
    (first,) = (fake for fake in rig.fakes if fake.opened)
    for fake in rig.fakes:
        fake.opened.clear()
    return first


@pytest.mark.parametrize("failure", [FULL, DRAINING])
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_another_scheduler_answers(failure: Failure, is_streamed: bool) -> None:
    async with Rig(3, max_wait_s=0.01) as rig:
        first = await first_choice(rig)
        refuse(first, failure)
        if is_streamed:
            assert content(await rig.events("/v1/chat/completions", CHAT)) == "w0 w1 w2 "
        else:
            status, body = await rig.chat()
            assert (status, body["choices"][0]["message"]["content"]) == (200, "w0 w1 w2 ")
        assert sorted(len(fake.opened) for fake in rig.fakes) == [0, 1, 1]
        assert len(first.opened) == 1
        assert rig.schedulers.num_resumptions == 0  # nothing had begun
        assert rig.schedulers.num_second_tries == 1


async def test_each_prompt_of_a_request_finds_its_own_scheduler() -> None:
    async with Rig(2, max_wait_s=0.01) as rig:
        first = await first_choice(rig)
        refuse(first, FULL)
        status, body = await rig.complete([f"prompt {i}" for i in range(8)])
        assert (status, [choice["text"] for choice in body["choices"]]) == (200, ["w0 w1 w2 "] * 8)


async def test_the_client_gets_the_shortest_delay_of_full_schedulers() -> None:
    async with Rig(3, max_wait_s=0.01) as rig:
        await first_choice(rig)
        for fake, delay_s in zip(rig.fakes, (7, 2, 5), strict=True):
            refuse(fake, Failure(Code.RESOURCE_EXHAUSTED, "full", retry_after_s=delay_s))
        async with rig.http.post("/v1/chat/completions", json=CHAT) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "2")
        assert [len(fake.opened) for fake in rig.fakes] == [1, 1, 1]
        assert rig.schedulers.num_second_tries == 2
        async with rig.http.get("/metrics") as response:
            assert "quire_gateway_second_tries_total 2.0" in (await response.text()).splitlines()


async def test_one_full_and_one_draining_scheduler_are_a_full_service() -> None:
    """A client that may come again is told when, whichever scheduler is asked first."""
    async with Rig(2, max_wait_s=0.01) as rig:
        first = await first_choice(rig)
        (second,) = (fake for fake in rig.fakes if fake is not first)
        for full, draining in ((first, second), (second, first)):
            refuse(full, FULL)
            refuse(draining, DRAINING)
            async with rig.http.post("/v1/chat/completions", json=CHAT) as response:
                assert (response.status, response.headers["Retry-After"]) == (429, "4")


async def test_all_draining_schedulers_are_tried_again_until_one_serves() -> None:
    async with Rig(2, resume_timeout_s=20) as rig:
        first = await first_choice(rig)
        for fake in rig.fakes:
            refuse(fake, DRAINING)

        async def serve_again() -> None:
            await until(lambda: all(len(fake.opened) > 1 for fake in rig.fakes))
            first.answer = first.words

        (status, _), _ = await asyncio.gather(rig.chat(), serve_again())
        assert status == 200


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (QUOTA, 429),
        (Failure(Code.INVALID_ARGUMENT, "bad"), 400),
        (Failure(Code.OUT_OF_RANGE, "too long"), 400),
        (Failure(Code.RESOURCE_EXHAUSTED, "too big"), 413),
        (Failure(Code.UNAUTHENTICATED, "no key"), 401),
        (Failure(Code.PERMISSION_DENIED, "no"), 403),
        (Failure(Code.DEADLINE_EXCEEDED, "late"), 504),
        (Failure(Code.INTERNAL, "bug"), 500),
    ],
)
async def test_a_refusal_of_the_request_or_its_tenant_is_final(failure: Failure, status: int) -> None:
    async with Rig(3, max_wait_s=0.01) as rig:
        refuse(await first_choice(rig), failure)
        assert (await rig.chat())[0] == status
        assert sorted(len(fake.opened) for fake in rig.fakes) == [0, 0, 1]


async def test_the_limit_of_a_tenant_is_final_at_the_second_scheduler_too() -> None:
    async with Rig(3, max_wait_s=0.01) as rig:
        first = await first_choice(rig)
        refuse(first, FULL)
        for fake in rig.fakes:
            if fake is not first:
                refuse(fake, QUOTA)
        async with rig.http.post("/v1/chat/completions", json=CHAT) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "9")
            assert "requests a minute" in (await response.json())["error"]["message"]
        assert sorted(len(fake.opened) for fake in rig.fakes) == [0, 1, 1]


@pytest.mark.parametrize("before", [[started()], [started(), delta(0, "a", 1)]])
async def test_a_request_that_has_begun_is_not_sent_to_another_scheduler(before: list[Any]) -> None:
    async with Rig(2, max_wait_s=0.01) as rig:
        refuse(await first_choice(rig), FULL, *before)
        async with rig.http.post("/v1/chat/completions", json=CHAT) as response:
            assert response.status == 429
        assert sorted(len(fake.opened) for fake in rig.fakes) == [0, 1]


async def test_schedulers_that_are_not_ready_are_not_asked() -> None:
    async with Rig(3, max_wait_s=0.01) as rig:
        first = await first_choice(rig)
        refuse(first, FULL)
        for fake, scheduler in zip(rig.fakes, rig.schedulers.all, strict=True):
            if fake is not first:
                fake.state = pb.SERVER_STATE_DRAINING
                await scheduler.poll()
        assert (await rig.chat())[0] == 429
        assert sorted(len(fake.opened) for fake in rig.fakes) == [0, 0, 1]


async def test_a_lone_scheduler_is_asked_once() -> None:
    async with Rig() as rig:
        refuse(rig.fake, FULL)
        assert (await rig.chat())[0] == 429
        assert len(rig.fake.opened) == 1


async def test_a_scheduler_that_says_that_it_drains_is_not_asked_again_until_it_serves() -> None:
    """It logs and counts a refused request for each try."""
    async with Rig() as rig:
        refuse(await first_choice(rig), DRAINING)
        rig.fake.state = pb.SERVER_STATE_DRAINING
        await rig.schedulers.all[0].poll()
        asking = asyncio.create_task(rig.chat())
        await asyncio.sleep(2)
        assert len(rig.fake.opened) == 1
        rig.fake.answer = rig.fake.words
        rig.fake.state = pb.SERVER_STATE_SERVING
        assert (await asking)[0] == 200


async def test_a_deadline_that_passes_while_no_scheduler_serves_is_noticed() -> None:
    async with Rig() as rig:
        refuse(await first_choice(rig), DRAINING)
        rig.fake.state = pb.SERVER_STATE_DRAINING
        await rig.schedulers.all[0].poll()
        stream = await rig.schedulers.open(pb.GenerateRequest(text="a"), Caller(deadline_s=time.monotonic() + 0.3))
        with pytest.raises(DeadlineExceededError):
            await stream.next()
        assert len(rig.fake.opened) == 1
