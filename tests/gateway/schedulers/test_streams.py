"""Streams outlive their scheduler, on the same one or on another."""

import asyncio

import grpc
import pytest

from gateway.schedulers import shared_call
from quire.v1 import generation_pb2 as pb
from tests.support.gateway.fake_scheduler import Answer, Failure, delta, finished, started
from tests.support.gateway.rig import CHAT, Rig, content
from tests.support.waiting import until

WORDS = "".join(f"w{i} " for i in range(60))


async def broken_and_restarted(rig: Rig, num_breaks: int = 1) -> None:
    """Breaks the connection in the middle of the answer, and lets the scheduler come back."""
    for i in range(num_breaks):
        await until(lambda i=i: len(rig.fake.opened) > i)
        await asyncio.sleep(0.03)
        await rig.fake.stop()
        await rig.fake.start()


@pytest.mark.parametrize("n", [1, 3])
async def test_a_streamed_answer_continues_after_a_break(n: int) -> None:
    async with Rig() as rig:
        rig.fake.words_each, rig.fake.step_s = 60, 0.005
        body = CHAT | {"n": n, "stream_options": {"include_usage": True}}
        events, _ = await asyncio.gather(rig.events("/v1/chat/completions", body), broken_and_restarted(rig, 2))
        assert len(rig.fake.opened) == 3
        assert rig.schedulers.num_resumptions == 2
    assert [content(events, i) for i in range(n)] == [WORDS] * n
    assert events[-2]["usage"]["completion_tokens"] == 60 * n
    assert events[-2]["usage"]["prompt_tokens"] == 3
    roles = [c["index"] for e in events[:-1] for c in e["choices"] if "role" in c["delta"]]
    assert sorted(roles) == list(range(n))  # the beginning is not repeated


async def test_an_answer_in_one_piece_continues_after_a_break() -> None:
    async with Rig() as rig:
        rig.fake.words_each, rig.fake.step_s = 60, 0.005
        (status, body), _ = await asyncio.gather(rig.complete(echo=True, logprobs=1), broken_and_restarted(rig))
    assert status == 200
    assert body["choices"][0]["text"] == "hi" + WORDS
    assert body["choices"][0]["logprobs"]["tokens"][-1] == "w59 "
    assert len(body["choices"][0]["logprobs"]["tokens"]) == 63


async def test_a_resumption_lists_what_was_received() -> None:
    async with Rig() as rig:
        rig.fake.words_each, rig.fake.step_s = 60, 0.005
        await asyncio.gather(rig.events("/v1/chat/completions", CHAT), broken_and_restarted(rig))
        first, second = rig.fake.requests
    assert first.resumable
    assert not first.HasField("resume")
    assert second.resume.continuation.seed == 5
    (received,) = second.resume.sequences
    assert list(received.token_ids) == list(range(10, 10 + len(received.token_ids)))
    assert 0 < len(received.token_ids) < 60


async def test_another_scheduler_takes_over() -> None:
    async with Rig(2) as rig:
        for fake in rig.fakes:
            fake.words_each, fake.step_s = 60, 0.005
        answering = asyncio.create_task(rig.events("/v1/chat/completions", CHAT))
        await until(lambda: any(fake.opened for fake in rig.fakes))
        await asyncio.sleep(0.05)
        first, second = sorted(rig.fakes, key=lambda fake: -len(fake.opened))
        assert not second.opened
        await first.stop()
        assert content(await answering) == WORDS
        assert len(second.opened) == 1


async def test_a_stream_gives_up_when_no_scheduler_comes_back() -> None:
    async with Rig(resume_timeout_s=0.3) as rig:
        rig.fake.words_each, rig.fake.step_s = 1000, 0.005
        answering = asyncio.create_task(rig.events("/v1/chat/completions", CHAT))
        await until(lambda: rig.fake.opened)
        await asyncio.sleep(0.05)
        await rig.fake.stop()
        events = await answering
    assert events[-1]["error"]["code"] == "service_unavailable"


async def test_streams_of_many_clients_share_one_call() -> None:
    async with Rig() as rig:
        answers = await asyncio.gather(*(rig.chat() for _ in range(50)))
        assert {status for status, _ in answers} == {200}
        assert {body["choices"][0]["message"]["content"] for _, body in answers} == {"w0 w1 w2 "}
        assert rig.fake.num_calls == 1
        assert len({body["id"] for _, body in answers}) == 50


async def test_all_streams_of_a_call_continue_after_a_break() -> None:
    async with Rig() as rig:
        rig.fake.words_each, rig.fake.step_s = 40, 0.005
        answers = asyncio.gather(*(rig.events("/v1/chat/completions", CHAT) for _ in range(20)))
        await until(lambda: len(rig.fake.opened) == 20)
        await asyncio.sleep(0.05)
        await rig.fake.stop()
        await rig.fake.start()
        texts = {content(events) for events in await answers}
        assert rig.fake.num_calls == 2
    assert texts == {"".join(f"w{i} " for i in range(40))}


async def test_a_request_that_no_message_can_hold_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_call, "MAX_REQUEST_BYTES", 10_000)
    async with Rig() as rig:
        rig.fake.words_each = 50
        other = asyncio.create_task(rig.chat())
        await until(lambda: rig.fake.opened)
        assert (await rig.complete("x" * 20_000))[0] == 413
        assert (await rig.complete(["a", "x" * 20_000]))[0] == 413
        assert (await other)[0] == 200
        assert rig.fake.num_calls == 1
        assert not rig.schedulers.all[0].call.num_streams


async def test_finished_samples_do_not_make_a_resumption_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_call, "MAX_REQUEST_BYTES", 10_000)
    long = [300] * 3_000

    async def answer(request: pb.GenerateRequest) -> Answer:
        yield started()
        if request.HasField("resume"):
            yield delta(3, "b", 11)
            yield finished(3, 2)
            return
        for index in range(3):
            yield delta(index, "x", *long)
            yield finished(index, len(long))
        yield delta(3, "a", 10)
        raise Failure(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    async with Rig() as rig:
        rig.fake.answer = answer
        status, body = await rig.complete(n=4)
    assert status == 200
    assert [choice["text"] for choice in body["choices"]] == ["x", "x", "x", "ab"]
    assert body["usage"]["completion_tokens"] == 3 * len(long) + 2


async def test_the_beginning_is_waited_for_if_the_scheduler_was_there_before() -> None:
    async with Rig() as rig:
        assert (await rig.chat())[0] == 200
        await rig.fake.stop()
        answering = asyncio.create_task(rig.chat())
        await asyncio.sleep(0.1)
        await rig.fake.start()
        assert (await answering)[0] == 200


async def test_equal_prefixes_go_to_one_scheduler_and_others_spread() -> None:
    async def answer(request: pb.GenerateRequest) -> Answer:
        async for message in rig.fakes[0].words(request):
            yield message

    async with Rig(3) as rig:
        for fake in rig.fakes:
            fake.answer = answer
        for _ in range(6):
            assert (await rig.complete("the same beginning"))[0] == 200
        assert sorted(len(fake.opened) for fake in rig.fakes) == [0, 0, 6]
        for i in range(60):
            assert (await rig.complete(f"{i} is another beginning"))[0] == 200
        assert all(len(fake.opened) > 5 for fake in rig.fakes)
