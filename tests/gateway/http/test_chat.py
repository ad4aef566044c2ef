"""Chat completions over HTTP, from the body to the events."""

from tests.support.gateway.fake_scheduler import MODEL
from tests.support.gateway.rig import CHAT, Rig, content


async def test_an_answer_in_one_piece() -> None:
    async with Rig() as rig:
        status, body = await rig.chat()
    assert status == 200
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["model"]) == ("chat.completion", MODEL)
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "w0 w1 w2 ", "refusal": None, "annotations": []},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


async def test_a_streamed_answer() -> None:
    async with Rig() as rig:
        events = await rig.events("/v1/chat/completions", CHAT | {"stream_options": {"include_usage": True}})
    assert events[-1] == "[DONE]"
    chunks = events[:-1]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert content(chunks) == "w0 w1 w2 "
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == 6


async def test_several_choices_have_their_own_index() -> None:
    async with Rig() as rig:
        status, body = await rig.chat(n=3)
        events = await rig.events("/v1/chat/completions", CHAT | {"n": 3})
    assert status == 200
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"]["completion_tokens"] == 9
    assert [content(events, i) for i in range(3)] == ["w0 w1 w2 "] * 3
    roles = [c["index"] for e in events[:-1] for c in e["choices"] if "role" in c["delta"]]
    assert sorted(roles) == [0, 1, 2]


async def test_logprobs_have_tokens_and_bytes() -> None:
    async with Rig() as rig:
        _, body = await rig.chat(logprobs=True, top_logprobs=2)
        events = await rig.events("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2})
    entries = body["choices"][0]["logprobs"]["content"]
    first = {"token": "w0 ", "logprob": -0.25, "bytes": [119, 48, 32]}
    other = {"token": "bytes:\\xe2\\x80", "logprob": -1.25, "bytes": [0xE2, 0x80]}
    assert entries[0] == first | {"top_logprobs": [first, other]}
    streamed = [c["logprobs"]["content"] for e in events[:-1] for c in e["choices"] if c["logprobs"]]
    assert [entry for part in streamed for entry in part] == entries
    assert rig.fake.requests[0].output.logprobs == 2
