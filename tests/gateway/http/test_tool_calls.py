"""Calls of tools over HTTP: what the scheduler gets, and what OpenAI's client makes of the answers."""

import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from openai import AsyncOpenAI, pydantic_function_tool
from openai.types.responses import FunctionToolParam
from pydantic import BaseModel

from quire.v1 import generation_pb2 as pb
from tests.gateway.http.test_other_apis import MESSAGE, RESPONSE, named_events
from tests.gateway.tools.texts import one_call
from tests.support.gateway.fake_scheduler import MODEL, Answer, delta, finished, started
from tests.support.gateway.rig import CHAT, Rig

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
PLAIN_TOOLS = [FunctionToolParam(type="function", name="weather", parameters=SCHEMA, strict=False)]
MESSAGE_TOOLS = [{"name": "weather", "input_schema": SCHEMA}]
CALL = one_call("hermes")
CALLS = f"I look.\n{CALL}\n{one_call('hermes', tool='get_time', arguments='{}')}"
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant" + one_call("harmony").removesuffix("<|call|>")


class Weather(BaseModel):
    """The weather of a city."""

    city: str


def says(
    *texts: str, reason: pb.FinishReason.ValueType = pb.FINISH_REASON_EOS
) -> Callable[[pb.GenerateRequest], Answer]:
    """Returns an answer: each text is that of a sequence, in deltas of three characters."""

    async def answer(request: pb.GenerateRequest) -> Answer:
        yield started()
        for index, text in enumerate(texts):
            for i, part in enumerate(parts_of(text)):
                yield delta(index, part, i, logprobs=request.output.HasField("logprobs"))
            yield finished(index, 5, reason)

    return answer


def parts_of(text: str) -> Iterable[str]:
    return [text[i : i + 3] for i in range(0, len(text), 3)]


def openai(rig: Rig) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"http://{rig.server.address}/v1", api_key="none", max_retries=0)


async def test_calls_in_one_piece() -> None:
    async with Rig(tool_format="hermes") as rig:
        rig.fake.answer = says(CALL, CALLS, "Hi.")
        status, body = await rig.chat(tools=TOOLS, n=3)
    assert status == 200
    first, second, third = (choice["message"] for choice in body["choices"])
    assert first["content"] is None
    assert second["content"] == "I look."
    assert [call["function"] for call in first["tool_calls"]] == [{"name": "weather", "arguments": '{"city": "Rome"}'}]
    assert [call["function"]["name"] for call in second["tool_calls"]] == ["weather", "get_time"]
    ids = [call["id"] for message in (first, second) for call in message["tool_calls"]]
    assert len(set(ids)) == 3
    assert all(each.startswith("call_") for each in ids)
    assert third == {"role": "assistant", "content": "Hi.", "refusal": None, "annotations": []}
    assert [choice["finish_reason"] for choice in body["choices"]] == ["tool_calls", "tool_calls", "stop"]


async def test_streamed_calls() -> None:
    """The id and the name of a call come once, before its arguments."""
    async with Rig(tool_format="hermes") as rig:
        rig.fake.answer = says(CALLS)
        events = await rig.events("/v1/chat/completions", CHAT | {"tools": TOOLS, "logprobs": True})
    choices = [event["choices"][0] for event in events[:-1]]
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    named = [call for call in calls if "id" in call]
    assert [(call["index"], call["type"], call["function"]["name"]) for call in named] == [
        (0, "function", "weather"), (1, "function", "get_time"),
    ]  # fmt: skip
    for index, arguments in ((0, '{"city": "Rome"}'), (1, "{}")):
        mine = [call for call in calls if call["index"] == index]
        assert mine[0] == named[index]
        assert "".join(call["function"]["arguments"] for call in mine) == arguments
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "I look."
    assert choices[-1]["finish_reason"] == "tool_calls"
    num_logprobs = sum(len(choice["logprobs"]["content"]) for choice in choices if choice["logprobs"])
    assert num_logprobs == len(list(parts_of(CALLS)))


async def test_openai_reads_streamed_calls() -> None:
    async with Rig(tool_format="hermes") as rig, openai(rig) as client:
        rig.fake.answer = says(one_call("hermes", tool="Weather"))
        fields: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
        async with client.chat.completions.stream(tools=[pydantic_function_tool(Weather)], **fields) as stream:
            completion = await stream.get_final_completion()
    (call,) = completion.choices[0].message.tool_calls or ()
    assert call.function.parsed_arguments == Weather(city="Rome")
    assert rig.fake.requests[0].structured_output.lark  # such tools are strict


async def test_openai_reads_a_streamed_response() -> None:
    async with Rig(tool_format="harmony") as rig, openai(rig) as client:
        rig.fake.answer = says(THOUGHT)
        async with client.responses.stream(model=MODEL, input="hi", tools=PLAIN_TOOLS) as stream:
            kinds = [event.type async for event in stream]
            response = await stream.get_final_response()
    thought, call = response.output
    assert thought.type == "reasoning"
    assert thought.content is not None
    assert thought.content[0].text == "Hm."
    assert call.type == "function_call"
    assert (call.name, call.arguments) == ("weather", '{"city": "Rome"}')
    assert kinds.count("response.function_call_arguments.done") == kinds.count("response.reasoning_text.done") == 1
    assert "response.function_call_arguments.delta" in kinds


async def test_a_response_in_one_piece_and_its_events() -> None:
    async with Rig(tool_format="hermes") as rig:
        rig.fake.answer = says(CALLS)
        _, body = await rig.post("/v1/responses", RESPONSE | {"tools": PLAIN_TOOLS})
        events = await named_events(rig, "/v1/responses", RESPONSE | {"tools": PLAIN_TOOLS})
    message, weather, time = body["output"]
    assert message["content"][0]["text"] == "I look."
    assert [(item["type"], item["name"], item["arguments"], item["status"]) for item in (weather, time)] == [
        ("function_call", "weather", '{"city": "Rome"}', "completed"), ("function_call", "get_time", "{}", "completed"),
    ]  # fmt: skip
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    for index in range(3):
        mine = [event["type"] for event in events if event.get("output_index") == index]
        assert (mine[0], mine[-1]) == ("response.output_item.added", "response.output_item.done")


async def test_tool_use_of_anthropic() -> None:
    async with Rig(tool_format="hermes") as rig:
        rig.fake.answer = says(CALLS)
        _, body = await rig.post("/v1/messages", MESSAGE | {"tools": MESSAGE_TOOLS, "stop_sequences": ["x"]})
        events = await named_events(rig, "/v1/messages", MESSAGE | {"tools": MESSAGE_TOOLS})
    text, weather, time = body["content"]
    assert text == {"type": "text", "text": "I look.", "citations": None}
    assert (weather["type"], weather["name"], weather["input"]) == ("tool_use", "weather", {"city": "Rome"})
    assert weather["caller"] == {"type": "direct"}
    assert weather["id"].startswith("toolu_")
    assert time["input"] == {}
    assert body["stop_reason"] == "tool_use"
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [(start["type"], start.get("name")) for start in starts] == [
        ("text", None), ("tool_use", "weather"), ("tool_use", "get_time"),
    ]  # fmt: skip
    deltas = [event for event in events if event["type"] == "content_block_delta" and event["index"] == 1]
    assert json.loads("".join(event["delta"]["partial_json"] for event in deltas)) == {"city": "Rome"}
    assert [event["index"] for event in events if event["type"] == "content_block_stop"] == [0, 1, 2]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


async def test_thinking_of_anthropic() -> None:
    async with Rig(tool_format="harmony") as rig:
        rig.fake.answer = says(THOUGHT)
        _, body = await rig.post("/v1/messages", MESSAGE | {"tools": MESSAGE_TOOLS})
    assert [block["type"] for block in body["content"]] == ["thinking", "tool_use"]
    assert body["content"][0]["thinking"] == "Hm."


async def test_a_call_that_breaks_off() -> None:
    """Its arguments are what the model wrote, and the reason is the length."""
    broken = CALL[: CALL.index("Rome") + 2]
    async with Rig(tool_format="hermes") as rig:
        rig.fake.answer = says(broken, reason=pb.FINISH_REASON_LENGTH)
        _, chat = await rig.chat(tools=TOOLS)
        _, response = await rig.post("/v1/responses", RESPONSE | {"tools": PLAIN_TOOLS})
        _, message = await rig.post("/v1/messages", MESSAGE | {"tools": MESSAGE_TOOLS})
    (choice,) = chat["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Ro'
    assert response["status"] == response["output"][0]["status"] == "incomplete"
    assert response["output"][0]["arguments"] == '{"city": "Ro'
    assert message["stop_reason"] == "max_tokens"
    assert message["content"][0]["input"] == {"invalid_json": '{"city": "Ro'}


@pytest.mark.parametrize("value", [r'"\ud83d"', "NaN", "-Infinity", "1e999", "[" * 500 + "]" * 500])
async def test_arguments_that_no_answer_can_contain(value: str) -> None:
    """Python reads them, but they are no JSON, no Unicode text, or too deep to be written."""
    arguments = f'{{"city": {value}}}'
    async with Rig(tool_format="hermes") as rig:
        rig.fake.answer = says(one_call("hermes", arguments))
        async with rig.http.post("/v1/messages", json=MESSAGE | {"tools": MESSAGE_TOOLS}) as response:
            assert response.status == 200, await response.text()
            (block,) = json.loads(await response.text(), parse_constant=pytest.fail)["content"]
    assert block["input"] == {"invalid_json": arguments}


async def test_a_message_of_anthropic_can_be_sent_back() -> None:
    async with Rig(tool_format="hermes") as rig:
        rig.fake.answer = says(CALLS)
        _, answer = await rig.post("/v1/messages", MESSAGE | {"tools": MESSAGE_TOOLS})
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "sunny"} for block in answer["content"][1:]
        ]
        said = [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": results}]
        body = {"model": MODEL, "messages": [*MESSAGE["messages"], *said], "tools": MESSAGE_TOOLS}
        assert (await rig.post("/v1/messages", MESSAGE | body))[0] == 200
        assert (await rig.post("/v1/messages/count_tokens", body))[0] == 200
        assert [message.role for message in rig.fake.requests[1].chat.messages] == ["user", "assistant", "tool", "tool"]


async def test_reasoning_content_without_tools() -> None:
    async with Rig(tool_format="harmony") as rig:
        rig.fake.answer = says(
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi!"
        )
        _, body = await rig.chat()
        events = await rig.events("/v1/chat/completions", CHAT)
        assert rig.fake.requests[0].output.special_tokens
    message = body["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Hi!")
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert "".join(each.get("reasoning_content", "") for each in deltas) == "Hm."
    assert "".join(each.get("content", "") for each in deltas) == "Hi!"


@pytest.mark.parametrize("text", [CALL, CALLS])
async def test_the_choice_none_leaves_the_text_alone(text: str) -> None:
    async with Rig(tool_format="hermes") as rig:
        rig.fake.answer = says(text)
        _, body = await rig.chat(tools=TOOLS, tool_choice="none")
        (request,) = rig.fake.requests
    assert body["choices"][0]["message"]["content"] == text
    assert "tool_calls" not in body["choices"][0]["message"]
    assert len(request.chat.tools) == 1
    assert not request.output.special_tokens


async def test_forced_calls_have_a_grammar() -> None:
    async with Rig(tool_format="hermes") as rig:
        rig.fake.answer = says(CALL)
        await rig.chat(tools=TOOLS)
        await rig.chat(tools=TOOLS, tool_choice="required")
        await rig.chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "weather"}})
        await rig.post("/v1/messages", MESSAGE | {"tools": MESSAGE_TOOLS, "tool_choice": {"type": "any"}})
        await rig.post("/v1/responses", RESPONSE | {"tools": PLAIN_TOOLS, "tool_choice": "required"})
        auto, *forced = rig.fake.requests
    assert not auto.HasField("structured_output")
    assert auto.output.special_tokens
    assert all('"city"' in request.structured_output.lark for request in forced)


async def test_ids_that_templates_of_mistral_accept() -> None:
    """Mistral's templates refuse ids that are not nine letters and digits (vLLM's users reported it)."""
    async with Rig(tool_format="mistral") as rig:
        rig.fake.answer = says(one_call("mistral"))
        _, body = await rig.chat(tools=TOOLS)
    (call,) = body["choices"][0]["message"]["tool_calls"]
    assert len(call["id"]) == 9
    assert call["id"].isalnum()


async def test_the_template_chooses_the_format() -> None:
    """That of the fake scheduler shows none, so that a call is a plain JSON object."""
    async with Rig() as rig:
        rig.fake.answer = says(one_call("json"))
        _, body = await rig.chat(tools=TOOLS)
        _, without = await rig.chat()
    assert body["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"
    assert without["choices"][0]["message"]["content"] == one_call("json")
