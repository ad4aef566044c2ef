"""Completions over HTTP."""

import grpc
import pytest

from quire.v1 import generation_pb2 as pb
from tests.support.gateway.fake_scheduler import MODEL, Answer, Failure, delta, finished, started
from tests.support.gateway.rig import Rig, content

Code = grpc.StatusCode


async def test_an_answer_in_one_piece() -> None:
    async with Rig() as rig:
        status, body = await rig.complete()
        assert rig.fake.requests[0].stopping.max_tokens == 16
    assert status == 200
    assert body["id"].startswith("cmpl-")
    assert (body["object"], body["model"]) == ("text_completion", MODEL)
    assert body["choices"] == [{"index": 0, "text": "w0 w1 w2 ", "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"]["total_tokens"] == 6


async def test_several_prompts_of_each_kind() -> None:
    async with Rig() as rig:
        for prompt in (["a", "b"], [[1, 2], [3]]):
            status, body = await rig.complete(prompt, n=2)
            assert status == 200
            assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
            assert body["usage"] == {
                "prompt_tokens": 6,
                "completion_tokens": 12,
                "total_tokens": 18,
                "prompt_tokens_details": {"cached_tokens": 2},
            }
        assert [request.text for request in rig.fake.requests[:2]] == ["a", "b"]
        assert [list(request.token_ids.ids) for request in rig.fake.requests[2:]] == [[1, 2], [3]]
        status, _ = await rig.complete([5, 6])
        assert list(rig.fake.requests[4].token_ids.ids) == [5, 6]


async def test_streamed_choices_of_several_prompts() -> None:
    async with Rig() as rig:
        body = {"model": MODEL, "prompt": ["a", "b"], "n": 2, "stream_options": {"include_usage": True}}
        events = await rig.events("/v1/completions", body)
    assert events[-1] == "[DONE]"
    assert [content(events, i) for i in range(4)] == ["w0 w1 w2 "] * 4
    assert events[-2]["usage"]["completion_tokens"] == 12
    reasons = [c["finish_reason"] for e in events[:-1] for c in e["choices"] if c["finish_reason"]]
    assert reasons == ["stop"] * 4


async def test_echo_and_logprobs_as_lm_eval_asks_for_them() -> None:
    async with Rig() as rig:
        status, body = await rig.complete([[100, 101, 102]], echo=True, logprobs=2, max_tokens=1, temperature=0)
    assert status == 200
    choice = body["choices"][0]
    assert choice["text"] == "bcd" + "w0 w1 w2 "
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["b", "<101>", "<102>", "w0 ", "w1 ", "w2 "]
    assert logprobs["token_logprobs"] == [None, -0.5, -1.0, -0.25, -0.25, -0.25]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1] == {"<101>": -0.5, "bytes:\\xe2\\x80": -1.5}
    assert logprobs["text_offset"][:3] == [0, 1, 6]


async def test_echo_of_a_text_with_logprobs_sends_its_tokens() -> None:
    async with Rig() as rig:
        _, body = await rig.complete("bcd", echo=True, logprobs=0, max_tokens=0)
        request = rig.fake.requests[0]
    assert list(request.token_ids.ids) == [1, 100, 101, 102]
    assert request.stopping.max_tokens == 1
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("bcd", "length")
    assert choice["logprobs"]["tokens"] == ["<s>", "<101>", "<102>"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 5]  # the tokenizer's own token is not in the text
    assert body["usage"]["completion_tokens"] == 0


async def test_echo_in_a_stream_comes_first() -> None:
    async with Rig() as rig:
        events = await rig.events("/v1/completions", {"model": MODEL, "prompt": "bcd", "echo": True, "logprobs": 1})
    assert content(events) == "bcdw0 w1 w2 "
    tokens = [token for e in events[:-1] for c in e["choices"] if c["logprobs"] for token in c["logprobs"]["tokens"]]
    assert tokens == ["<s>", "<101>", "<102>", "w0 ", "w1 ", "w2 "]


async def test_best_of_returns_the_most_probable_sequences() -> None:
    """Those with the highest mean log-probability of a token, whatever their lengths."""

    async def answer(request: pb.GenerateRequest) -> Answer:
        assert request.sampling.n == 3
        assert request.output.logprobs == 0
        yield started()
        for index, values in enumerate(((-3.0,), (-1.0, -1.0, -1.0), (-2.0,))):  # the best mean has a small sum
            message = delta(index, f"t{index}", *[7] * len(values), logprobs=True)
            for token, value in zip(message.delta.logprobs, values, strict=True):
                token.chosen.logprob = value
            yield message
            yield finished(index, len(values))

    async with Rig() as rig:
        rig.fake.answer = answer
        status, body = await rig.complete(best_of=3, n=2)
    assert status == 200
    assert [choice["text"] for choice in body["choices"]] == ["t1", "t2"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert [choice["logprobs"] for choice in body["choices"]] == [None, None]
    assert body["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_error_names_the_prompt_that_has_the_problem(is_streamed: bool) -> None:
    async def answer(request: pb.GenerateRequest) -> Answer:
        ids = request.token_ids.ids
        if 999 in ids:
            raise Failure(Code.INVALID_ARGUMENT, "bad", violations={f"token_ids.ids[{list(ids).index(999)}]": "is bad"})
        async for message in rig.fake.words(request):
            yield message

    async with Rig() as rig:
        rig.fake.answer = answer
        for prompt, param in (([[5], [6, 999]], "prompt[1][1]"), ([999], "prompt[0]")):
            body = {"model": MODEL, "prompt": prompt, "stream": is_streamed}
            async with rig.http.post("/v1/completions", json=body) as response:
                assert f'"message": "{param}: is bad"' in (await response.text()).replace('":"', '": "')


async def test_an_error_of_an_echo_names_the_prompt_that_has_the_problem() -> None:
    async with Rig() as rig:
        for prompt, param in (([[5], [999]], "prompt[1][0]"), ([999], "prompt[0]")):
            status, body = await rig.complete(prompt, echo=True)
            assert (status, body["error"]["param"]) == (400, param)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_the_failure_of_one_prompt_fails_the_request(is_streamed: bool) -> None:
    async def answer(request: pb.GenerateRequest) -> Answer:
        if request.text == "bad":
            raise Failure(grpc.StatusCode.OUT_OF_RANGE, "too long")
        async for message in rig.fake.words(request):
            yield message

    async with Rig() as rig:
        rig.fake.answer = answer
        rig.fake.words_each = 200
        status, body = await rig.complete(["good", "bad"], stream=is_streamed) if not is_streamed else (400, None)
        if is_streamed:
            async with rig.http.post(
                "/v1/completions", json={"model": MODEL, "prompt": ["good", "bad"], "stream": True}
            ) as response:
                text = await response.text()
            assert "context_length_exceeded" in text
        else:
            assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        while not rig.fake.cancelled:  # the other prompt
            await rig.schedulers.all[0].poll()
        assert rig.fake.cancelled == [1]
