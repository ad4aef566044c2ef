"""Thoughts of a reasoning model in the three APIs."""

import asyncio
from typing import Any

import grpc
import pytest

from gateway.api.chat import parse_chat
from gateway.http.model_tools import ServedModelTools
from quire.v1 import tokenization_pb2 as tokens_pb
from tests.gateway.http.test_other_apis import MESSAGE, RESPONSE, named_events
from tests.gateway.http.test_tool_calls import MESSAGE_TOOLS, PLAIN_TOOLS, TOOLS, says
from tests.gateway.tools.texts import one_call
from tests.support.gateway.fake_scheduler import FakeScheduler
from tests.support.gateway.rig import CHAT, Rig, content

TEXT = "<think>\nHm, a < b.\n</think>\n\nYes."
CALL = f"<think>\nHm.\n</think>\n\n{one_call('hermes')}"


class Thinker(FakeScheduler):
    """Its template shows thoughts; `generation_prompt` is what it adds to a chat.

    num_probes  chats that were tokenised
    """

    generation_prompt = "<|im_start|>assistant\n"
    num_probes = 0
    fails = False

    async def GetTokenizerInfo(  # noqa: N802
        self, request: tokens_pb.GetTokenizerInfoRequest, context: Any
    ) -> tokens_pb.GetTokenizerInfoResponse:
        return tokens_pb.GetTokenizerInfoResponse(eos_token_ids=[0], chat_template="<tool_call> </think>")

    async def Tokenize(self, request: tokens_pb.TokenizeRequest, context: Any) -> tokens_pb.TokenizeResponse:  # noqa: N802
        if request.HasField("chat"):
            self.num_probes += 1
            if self.fails:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
            text = request.chat.messages[-1].content + self.generation_prompt
            if request.chat.template_arguments.get("enable_thinking") == "false":
                text += "<think>\n\n</think>\n\n"
            return await super().Tokenize(tokens_pb.TokenizeRequest(text=text, return_bytes=True), context)
        return await super().Tokenize(request, context)


def thinking_rig(text: str = TEXT, *, is_opened: bool = False) -> Rig:
    """The scheduler says the text; with `is_opened`, the prompt has its opening tag."""
    thinker = Thinker()
    rig = Rig()
    rig.fakes = [thinker]
    if is_opened:
        thinker.generation_prompt += "<think>\n"
        text = text.removeprefix("<think>\n")
    thinker.answer = says(text)
    return rig


def thoughts(events: list[Any]) -> str:
    deltas = [choice["delta"] for event in events if event != "[DONE]" for choice in event["choices"]]
    return "".join(delta.get("reasoning_content", "") for delta in deltas)


@pytest.mark.parametrize("is_opened", [False, True])
async def test_chats(is_opened: bool) -> None:
    async with thinking_rig(is_opened=is_opened) as rig:
        _, body = await rig.chat()
        message = body["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm, a < b.", "Yes.")
        events = await rig.events("/v1/chat/completions", CHAT)
        assert (thoughts(events), content(events)) == ("Hm, a < b.", "Yes.")
        assert events[-2]["choices"][0]["finish_reason"] == "stop"
        assert rig.fake.requests[0].output.special_tokens  # the tags can be special tokens


@pytest.mark.parametrize("is_opened", [False, True])
async def test_responses_have_a_reasoning_item(is_opened: bool) -> None:
    async with thinking_rig(is_opened=is_opened) as rig:
        _, body = await rig.post("/v1/responses", RESPONSE)
        events = await named_events(rig, "/v1/responses", RESPONSE)
    for output in (body["output"], events[-1]["response"]["output"]):
        thought, message = output
        assert (thought["type"], thought["summary"]) == ("reasoning", [])
        assert thought["content"] == [{"type": "reasoning_text", "text": "Hm, a < b."}]
        assert message["content"][0]["text"] == "Yes."
    names = [event["type"] for event in events]
    assert names.index("response.reasoning_text.done") < names.index("response.output_text.delta")


@pytest.mark.parametrize("is_opened", [False, True])
async def test_messages_have_a_thinking_block(is_opened: bool) -> None:
    async with thinking_rig(is_opened=is_opened) as rig:
        _, body = await rig.post("/v1/messages", MESSAGE)
        events = await named_events(rig, "/v1/messages", MESSAGE)
    assert body["content"] == [
        {"type": "thinking", "thinking": "Hm, a < b.", "signature": ""},
        {"type": "text", "text": "Yes.", "citations": None},
    ]
    started = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert started == ["thinking", "text"]


@pytest.mark.parametrize("is_opened", [False, True])
async def test_usage_counts_the_tokens_of_thoughts(is_opened: bool) -> None:
    """A token of the fake scheduler has three characters. Tags and white space beside them count with what follows."""
    num_thought = len(["Hm,", " a ", "< b", ".\n<"] if is_opened else ["<th", "ink", ">\nH", "m, ", "a <", " b."])
    async with thinking_rig(is_opened=is_opened) as rig:
        _, chat = await rig.chat()
        events = await rig.events("/v1/chat/completions", CHAT | {"stream_options": {"include_usage": True}})
        _, response = await rig.post("/v1/responses", RESPONSE)
        _, two = await rig.chat(n=2)
    for usage in (chat["usage"], events[-2]["usage"]):
        assert usage["completion_tokens_details"] == {"reasoning_tokens": num_thought}
        assert usage["completion_tokens"] > num_thought
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": num_thought}
    assert two["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_thought}


async def test_calls_follow_a_thought_in_all_apis() -> None:
    async with thinking_rig(CALL) as rig:
        _, chat = await rig.chat(tools=TOOLS)
        _, response = await rig.post("/v1/responses", RESPONSE | {"tools": PLAIN_TOOLS})
        _, message = await rig.post("/v1/messages", MESSAGE | {"tools": MESSAGE_TOOLS})
    answer = chat["choices"][0]["message"]
    assert (answer["reasoning_content"], answer["content"]) == ("Hm.", None)
    assert answer["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert [item["type"] for item in response["output"]] == ["reasoning", "function_call"]
    assert [block["type"] for block in message["content"]] == ["thinking", "tool_use"]


async def test_template_arguments_decide_whether_the_prompt_opens_the_thought() -> None:
    async with thinking_rig("Yes.", is_opened=True) as rig:
        for _ in range(3):
            _, body = await rig.chat()
            assert body["choices"][0]["message"]["reasoning_content"] == "Yes."
            _, body = await rig.chat(chat_template_kwargs={"enable_thinking": False})
            assert body["choices"][0]["message"]["content"] == "Yes."
            assert "reasoning_content" not in body["choices"][0]["message"]
        assert rig.fake.num_probes == 2  # type: ignore[attr-defined]


async def test_what_users_write_does_not_count() -> None:
    async with thinking_rig("Yes.") as rig:
        _, body = await rig.chat(messages=[{"role": "user", "content": "Open <think>"}])
    assert body["choices"][0]["message"]["content"] == "Yes."


async def test_a_continued_message_can_be_within_a_thought() -> None:
    async with thinking_rig(".</think>Yes.") as rig:
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<think>Hm"}]
        _, body = await rig.chat(messages=messages, continue_final_message=True)
    message = body["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (".", "Yes.")


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": ".*"}},
    ],
)
async def test_an_answer_under_a_grammar_has_no_thought(fields: dict[str, Any]) -> None:
    async with thinking_rig('{"tag": "<think>"}', is_opened=True) as rig:
        _, body = await rig.chat(**fields)
    assert body["choices"][0]["message"]["content"] == '{"tag": "<think>"}'


async def test_forced_calls_have_no_thought() -> None:
    async with thinking_rig(one_call("hermes"), is_opened=True) as rig:
        _, body = await rig.chat(tools=TOOLS, tool_choice="required")
    message = body["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["name"] == "weather"
    assert "reasoning_content" not in message


async def test_log_probabilities_stay_complete() -> None:
    async with thinking_rig() as rig:
        events = await rig.events("/v1/chat/completions", CHAT | {"logprobs": True})
        _, body = await rig.chat(logprobs=True)
    choices = [event["choices"][0] for event in events[:-1]]
    found = [each for choice in choices if choice["logprobs"] for each in choice["logprobs"]["content"]]
    assert "".join(each["token"] for each in found) == TEXT
    assert found == body["choices"][0]["logprobs"]["content"]


async def logprobs_of_response(rig: Rig, **fields: Any) -> list[str]:
    """Returns the tokens of the message, for which both forms of the answer have log-probabilities."""
    body = RESPONSE | {"include": ["message.output_text.logprobs"]} | fields
    _, whole = await rig.post("/v1/responses", body)
    events = await named_events(rig, "/v1/responses", body)
    streamed = [each for event in events if event["type"].endswith("text.delta") for each in event.get("logprobs", ())]
    message = next(item for item in whole["output"] if item["type"] == "message")
    assert streamed == message["content"][0]["logprobs"]
    return [each["token"] for each in streamed]


@pytest.mark.parametrize("tools", [[], PLAIN_TOOLS])
async def test_a_response_has_log_probabilities_of_text_that_was_held_back(tools: list[Any]) -> None:
    text = "One  \n  two <b> three  \n\n  four."
    async with thinking_rig(text) as rig:
        assert "".join(await logprobs_of_response(rig, tools=tools)) == text


async def test_a_message_of_a_response_has_the_tokens_of_its_own_text() -> None:
    async with thinking_rig("<think>\nHm, a < b.\n</think>\n\nYes, so.") as rig:
        assert await logprobs_of_response(rig) == ["\n\nY", "es,", " so", "."]


async def test_a_scheduler_that_does_not_tell_is_asked_again() -> None:
    """Otherwise the thought would be part of the answer."""
    async with thinking_rig(is_opened=True) as rig:
        rig.fake.fails = True  # type: ignore[attr-defined]
        asking = asyncio.create_task(rig.chat())
        await asyncio.sleep(0.2)
        rig.fake.fails = False  # type: ignore[attr-defined]
        _, body = await asking
    assert body["choices"][0]["message"]["reasoning_content"] == "Hm, a < b."


async def test_many_template_arguments_are_not_remembered_for_ever() -> None:
    async with thinking_rig(is_opened=True) as rig:
        tools = ServedModelTools(rig.schedulers, None)
        for value in (*range(200), "y" * 2000):
            parsed = parse_chat(CHAT | {"chat_template_kwargs": {"x": value}})
            found = await tools.of(parsed)
            assert found is not None
            assert await tools.begins_in_thought(parsed, found, "")
            assert len(tools._opened) <= 64
            assert all(len(str(key)) < 2000 for key in tools._opened)
