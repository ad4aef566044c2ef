"""A completion over HTTP whose stream broke off is continued, and nothing is repeated or missing."""

from base64 import b64encode
from typing import Any

import aiohttp
import pytest

from quire.v1 import generation_pb2 as pb
from tests.support.live.served import Served, body, read_messages


def asked_again(request: dict[str, Any], received: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the request that continues a stream, by the rules of docs/protocol.md."""
    sequences: dict[int, dict[str, Any]] = {}
    for message in received[1:]:
        part = message.get("delta") or message["finished"]
        sequence = sequences.setdefault(part["index"], {"index": part["index"], "token_ids": []})
        sequence["token_ids"] += part.get("token_ids", [])
        sequence["has_last"] = part.get("last", True)
        sequence["finished"] = "finished" in message
    continuation = received[0]["started"]["continuation"]
    return request | {"resume": {"continuation": continuation, "sequences": list(sequences.values())}}


def content(messages: list[dict[str, Any]]) -> dict[tuple[int, str], Any]:
    """Returns text, token ids and end of each sequence, and checks that nothing follows its end."""
    found: dict[tuple[int, str], Any] = {}
    for message in messages:
        if "delta" in message:
            delta = message["delta"]
            assert (delta["index"], "end") not in found
            for name in ("text", "token_ids"):
                found[delta["index"], name] = found.get((delta["index"], name), type(delta[name])()) + delta[name]
        elif "finished" in message:
            finished = message["finished"]
            assert (finished["index"], "end") not in found
            found[finished["index"], "end"] = (finished["reason"], finished["usage"]["completion_tokens"])
    return found


async def complete(served: Served, session: aiohttp.ClientSession, request: dict[str, Any]) -> list[dict[str, Any]]:
    async with session.post(f"{served.url}/live/completions", json=request) as response:
        assert response.status == 200, await response.text()
        return await read_messages(response)


async def test_a_completion_continues_after_every_message(served: Served, session: aiohttp.ClientSession) -> None:
    request = body(max_tokens=40, request_id="me", resumable=True, sampling={"n": 2})
    messages = await complete(served, session, request)
    expected = content(messages)
    assert len(expected[0, "token_ids"]) == len(expected[1, "token_ids"]) == 40
    for place in range(1, len(messages) + 1):
        rest = await complete(served, session, asked_again(request, messages[:place]))
        assert rest[0] == messages[0]
        assert content(messages[:place] + rest[1:]) == expected, f"cut after message {place} of {len(messages)}"


async def test_the_page_gets_ids_only_if_it_can_resume(served: Served, session: aiohttp.ClientSession) -> None:
    started, *rest = await complete(served, session, body())
    assert "continuation" not in started["started"]
    assert all(message["delta"].keys() == {"index", "text"} for message in rest if "delta" in message)


@pytest.mark.parametrize(
    ("resume", "field"),
    [
        (7, "resume"),
        ({}, "resume.continuation"),
        ({"continuation": 7}, "resume.continuation"),
        ({"continuation": "a"}, "resume.continuation"),
        ({"continuation": "/////w=="}, "resume.continuation"),
        ({"sequences": {}}, "resume.sequences"),
        ({"sequences": [{}] * 4097}, "resume.sequences"),
        ({"sequences": [7]}, "resume.sequences[0]"),
        ({"sequences": [{}, {"index": -1}]}, "resume.sequences[1]"),
        ({"sequences": [{"token_ids": ["a"]}]}, "resume.sequences[0]"),
        ({"sequences": [{"token_ids": [400]}]}, "resume.sequences[0].token_ids[0]"),
        ({"sequences": [{"tokens": [1]}]}, "resume.sequences[0]"),
        ({"num": 1}, "resume.num"),
    ],
)
async def test_a_resumption_that_cannot_be_read_is_refused_by_field(
    served: Served, session: aiohttp.ClientSession, resume: Any, field: str
) -> None:
    request = body(resumable=True, sampling={"seed": 3})
    (started, *_) = await complete(served, session, request)
    if isinstance(resume, dict) and field != "resume.continuation":
        resume = {"continuation": started["started"]["continuation"]} | resume
    async with session.post(f"{served.url}/live/completions", json=request | {"resume": resume}) as response:
        assert response.status == 400
        assert [each["field"] for each in (await response.json())["error"]["violations"]] == [field]


async def test_a_stream_of_another_model_is_refused_and_no_bug(served: Served, session: aiohttp.ClientSession) -> None:
    """A page that stays open while the model is replaced continues the stream of the old one."""
    resume = {"continuation": b64encode(pb.Continuation(seed=1, model_digest="old").SerializeToString()).decode()}
    request = body(resumable=True) | {"resume": resume}
    async with session.post(f"{served.url}/live/completions", json=request) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (400, "FAILED_PRECONDITION")
