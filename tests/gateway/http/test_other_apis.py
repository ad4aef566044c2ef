"""The Responses API and Anthropic's API over HTTP, from the body to the events."""

import json
from typing import Any

import grpc
import pytest

from quire.v1 import generation_pb2 as pb
from tests.support.gateway.fake_scheduler import MODEL, Answer, Failure, delta, finished, started
from tests.support.gateway.rig import Rig

RESPONSE = {"model": MODEL, "input": "hi"}
MESSAGE = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}

END = {"stop_reason": "end_turn", "stop_sequence": None, "stop_details": None, "container": None}


async def named_events(rig: Rig, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the data of the events, which repeat the name of their event."""
    async with rig.http.post(path, json=body | {"stream": True}) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        text = await response.text()
    events = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


async def breaking(_: pb.GenerateRequest) -> Answer:
    yield started()
    yield delta(0, "w0 ", 10)
    raise Failure(grpc.StatusCode.INTERNAL, "it broke")


async def test_a_response_in_one_piece() -> None:
    async with Rig() as rig:
        status, body = await rig.post("/v1/responses", RESPONSE | {"instructions": "x", "metadata": {"a": "b"}})
    assert status == 200
    assert (body["object"], body["status"], body["model"]) == ("response", "completed", MODEL)
    assert (body["instructions"], body["metadata"], body["store"]) == ("x", {"a": "b"}, False)
    (item,) = body["output"]
    assert item["content"] == [{"type": "output_text", "text": "w0 w1 w2 ", "annotations": [], "logprobs": []}]
    assert body["usage"]["total_tokens"] == 6
    assert body["usage"]["input_tokens_details"] == {"cached_tokens": 1}
    assert body["completed_at"] >= body["created_at"]


async def test_a_response_has_all_fields_of_its_schema() -> None:
    tool = {"type": "function", "name": "f"}
    given = {"safety_identifier": "me", "prompt_cache_key": "k", "tools": [tool], "tool_choice": "none"}
    async with Rig() as rig:
        _, body = await rig.post("/v1/responses", RESPONSE | given)
    settings = {"service_tier": "default", "presence_penalty": 0, "frequency_penalty": 0, "max_tool_calls": None}
    expected = given | settings | {"tools": [tool | {"description": None, "parameters": None, "strict": None}]}
    assert {name: body[name] for name in expected} == expected


async def test_a_streamed_response() -> None:
    async with Rig() as rig:
        events = await named_events(rig, "/v1/responses", RESPONSE)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    names = [event["type"].removeprefix("response.") for event in events]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(names[4:-4]) == {"output_text.delta"}
    assert names[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert "".join(event["delta"] for event in events[4:-4]) == events[-4]["text"] == "w0 w1 w2 "
    assert (events[0]["response"]["status"], events[0]["response"]["completed_at"]) == ("in_progress", None)
    final = events[-1]["response"]
    assert final["output"][0]["content"][0]["text"] == "w0 w1 w2 "
    assert final["output"][0]["id"] == events[4]["item_id"] == events[2]["item"]["id"]
    assert final["usage"]["output_tokens"] == 3


async def test_a_response_that_is_cut_off_is_incomplete() -> None:
    async def cut_off(_: pb.GenerateRequest) -> Answer:
        yield started()
        yield delta(0, "w0 ", 10)
        yield pb.GenerateResponse(finished=pb.Finished(index=0, reason=pb.FINISH_REASON_LENGTH))

    async with Rig() as rig:
        rig.fake.answer = cut_off
        _, body = await rig.post("/v1/responses", RESPONSE)
        events = await named_events(rig, "/v1/responses", RESPONSE)
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["completed_at"] is None
    assert events[-1]["type"] == "response.incomplete"


async def test_a_message_in_one_piece() -> None:
    async with Rig() as rig:
        status, body = await rig.post("/v1/messages", MESSAGE)
    assert status == 200
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", MODEL)
    assert body["content"] == [{"type": "text", "text": "w0 w1 w2 ", "citations": None}]
    assert {name: body[name] for name in END} == END
    counts = {"input_tokens": 2, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 1, "output_tokens": 3}
    absent = dict.fromkeys(("cache_creation", "inference_geo", "output_tokens_details", "server_tool_use"))
    assert body["usage"] == counts | absent | {"service_tier": "standard"}


async def test_a_streamed_message() -> None:
    async with Rig() as rig:
        events = await named_events(rig, "/v1/messages", MESSAGE)
    names = [event["type"] for event in events]
    assert names[:2] == ["message_start", "content_block_start"]
    assert set(names[2:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(event["delta"]["text"] for event in events[2:-3]) == "w0 w1 w2 "
    assert events[1]["content_block"] == {"type": "text", "text": "", "citations": None}
    assert events[-2]["delta"] == END
    assert events[-2]["usage"]["output_tokens"] == 3


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        (
            "/v1/responses",
            RESPONSE,
            [
                "response.created", "response.in_progress", "response.output_item.added",
                "response.content_part.added", "response.output_text.done", "response.content_part.done",
                "response.output_item.done", "response.completed",
            ],
        ),
        (
            "/v1/messages",
            MESSAGE,
            ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"],
        ),
    ],
)  # fmt: skip
async def test_an_answer_without_text_has_one_empty_part(path: str, body: dict[str, Any], names: list[str]) -> None:
    async def silent(_: pb.GenerateRequest) -> Answer:
        yield started()
        yield delta(0, "", 10)
        yield finished(0, 1)

    async with Rig() as rig:
        rig.fake.answer = silent
        events = await named_events(rig, path, body)
        _, whole = await rig.post(path, body)
    assert [event["type"] for event in events] == names
    (part,) = whole["output"][0]["content"] if path == "/v1/responses" else whole["content"]
    assert part["text"] == ""


async def test_errors_have_the_form_of_their_api() -> None:
    async with Rig(key="right", own_key="right") as rig:
        status, body = await rig.post("/v1/messages", MESSAGE | {"max_tokens": "x"})
        assert (status, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")
        assert "max_tokens" in body["error"]["message"]
        status, body = await rig.post("/v1/messages", MESSAGE)
        assert (status, body["error"]["type"]) == (401, "authentication_error")
        status, _ = await rig.post("/v1/messages", MESSAGE, **{"X-Api-Key": "right"})
        assert status == 200
        status, body = await rig.post("/v1/responses", RESPONSE | {"top_p": "x"}, Authorization="Bearer right")
        assert (status, body["error"]["param"]) == (400, "top_p")


@pytest.mark.parametrize(("path", "body"), [("/v1/responses", RESPONSE), ("/v1/messages", MESSAGE)])
async def test_an_error_after_the_beginning_is_the_last_event(path: str, body: dict[str, Any]) -> None:
    async with Rig() as rig:
        rig.fake.answer = breaking
        events = await named_events(rig, path, body)
    last = events[-1]
    assert last["type"] == ("error" if path == "/v1/messages" else "response.failed")
    error = last["error"] if path == "/v1/messages" else last["response"]["error"]
    assert "it broke" in error["message"]


async def test_tokens_of_a_message_are_counted() -> None:
    counted = {name: value for name, value in MESSAGE.items() if name != "max_tokens"}
    async with Rig() as rig:
        assert await rig.post("/v1/messages/count_tokens", counted) == (200, {"input_tokens": 3})
        for body, status, kind in (
            (counted | {"model": "x"}, 404, "not_found_error"),
            (MESSAGE, 400, "invalid_request_error"),
        ):
            answer = await rig.post("/v1/messages/count_tokens", body)
            assert (answer[0], answer[1]["type"], answer[1]["error"]["type"]) == (status, "error", kind)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_message_has_the_header_in_which_anthropics_clients_find_its_id(is_streamed: bool) -> None:
    async with Rig() as rig:
        async with rig.http.post("/v1/messages", json=MESSAGE | {"stream": is_streamed}) as response:
            text = await response.text()
    assert response.headers["Request-Id"].startswith("msg_")
    assert f'"id":"{response.headers["Request-Id"]}"' in text
