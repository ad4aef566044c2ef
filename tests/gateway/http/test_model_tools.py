"""The gateway asks a scheduler for the format of the model, once."""

import json
from typing import Any

import grpc
import pytest

from gateway.api.anthropic import parse_message
from gateway.api.chat import parse_chat
from gateway.api.errors import ApiError
from gateway.api.responses import parse_response
from gateway.api.tool_calls import ModelTools
from gateway.http.model_tools import prepare
from gateway.tools.formats import FORMATS
from quire.v1 import generation_pb2 as pb
from quire.v1 import tokenization_pb2 as tokens_pb
from tests.gateway.http.test_other_apis import MESSAGE, named_events
from tests.gateway.http.test_tool_calls import MESSAGE_TOOLS, TOOLS, says
from tests.gateway.tools.texts import one_call
from tests.support.gateway.fake_scheduler import Answer, FakeScheduler, delta, finished, started
from tests.support.gateway.rig import CHAT, Rig

MARKERS = {"<tool_call>": 300, "</tool_call>": 301}
ANSWER = {"type": "object", "properties": {"mood": {"type": "string"}}, "required": ["mood"]}
FORMAT = {"type": "json_schema", "schema": ANSWER}
RESPONSE_TOOLS = [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}]


class Qwen(FakeScheduler):
    """Has the markers of Qwen as tokens, and a template that writes them."""

    num_asked = 0
    code: grpc.StatusCode | None = None

    def __init__(self, key: str | None = None) -> None:
        super().__init__(key)
        self.askers: list[Any] = []

    async def GetTokenizerInfo(  # noqa: N802
        self, request: tokens_pb.GetTokenizerInfoRequest, context: Any
    ) -> tokens_pb.GetTokenizerInfoResponse:
        self.num_asked += 1
        self.askers.append(dict(context.invocation_metadata())["authorization"])
        if self.code is not None:
            await context.abort(self.code, "not now")
        return tokens_pb.GetTokenizerInfoResponse(eos_token_ids=[0], chat_template="<tool_call>")

    async def Tokenize(self, request: tokens_pb.TokenizeRequest, context: Any) -> tokens_pb.TokenizeResponse:  # noqa: N802
        self.askers.append(dict(context.invocation_metadata())["authorization"])
        if request.text in MARKERS:
            return tokens_pb.TokenizeResponse(token_ids=[MARKERS[request.text]], tokens=[request.text.encode()])
        return await super().Tokenize(request, context)


def rig_of(qwen: Qwen) -> Rig:
    rig = Rig(own_key="own")
    rig.fakes = [qwen]
    return rig


async def test_the_questions_do_not_count_against_the_limits_of_a_client() -> None:
    qwen = Qwen()
    async with rig_of(qwen) as rig:
        status, _ = await rig.post("/v1/chat/completions", CHAT | {"tools": TOOLS}, Authorization="Bearer mine")
    assert status == 200
    assert set(qwen.askers) == {"Bearer own"}
    assert [opened.authorization for opened in qwen.opened] == ["Bearer mine"]


async def test_markers_become_tokens_of_the_grammar() -> None:
    async with rig_of(Qwen()) as rig:
        rig.fake.answer = says(one_call("hermes"))
        _, body = await rig.chat(tools=TOOLS, tool_choice="required")
        await rig.chat(tools=TOOLS)
        first, second = rig.fake.requests
    assert "<[300]>" in first.structured_output.lark
    assert "<[301]>" in first.structured_output.lark
    assert first.output.special_tokens
    assert second.output.special_tokens
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    assert rig.fake.num_asked == 1  # type: ignore[attr-defined]


async def test_chats_without_tools_need_no_format() -> None:
    """A scheduler that cannot tell it still answers them; the format is asked for again later."""
    qwen = Qwen()
    qwen.code = grpc.StatusCode.UNIMPLEMENTED
    async with rig_of(qwen) as rig:
        assert (await rig.chat())[0] == 200
        assert (await rig.chat(tools=TOOLS))[0] == 500
        qwen.code = None
        assert (await rig.chat(tools=TOOLS))[0] == 200


class Named(Qwen):
    """Has two EOS tokens with a name, and one that its tokenizer lacks."""

    async def GetTokenizerInfo(  # noqa: N802
        self, request: tokens_pb.GetTokenizerInfoRequest, context: Any
    ) -> tokens_pb.GetTokenizerInfoResponse:
        return tokens_pb.GetTokenizerInfoResponse(eos_token_ids=[300, 400, 301], chat_template="{{ messages }}")

    async def Detokenize(  # noqa: N802
        self, request: tokens_pb.DetokenizeRequest, context: Any
    ) -> tokens_pb.DetokenizeResponse:
        names = {number: name for name, number in MARKERS.items()}
        if request.token_ids[0] not in names:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "is no token")
        return tokens_pb.DetokenizeResponse(text="".join(names[each] for each in request.token_ids))


@pytest.mark.parametrize("token_id", [300, 301])
@pytest.mark.parametrize("tools", [[], MESSAGE_TOOLS])
async def test_names_of_eos_tokens_are_no_text_of_a_message(token_id: int, tools: list[Any]) -> None:
    async def answer(request: pb.GenerateRequest) -> Answer:
        assert request.stopping.include_stop
        name = {number: name for name, number in MARKERS.items()}[token_id]
        yield started()
        yield delta(0, "Yes.", 10)
        yield delta(0, name, token_id)
        yield finished(0, 2)

    async with rig_of(Named()) as rig:
        rig.fake.answer = answer
        body = MESSAGE | {"stop_sequences": ["a", "b"], "tools": tools}
        _, whole = await rig.post("/v1/messages", body)
        events = await named_events(rig, "/v1/messages", body)
    assert [block["text"] for block in whole["content"]] == ["Yes."]
    assert "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta") == "Yes."


async def test_the_flag_replaces_the_template() -> None:
    async with Rig(tool_format="llama3") as rig:
        rig.fake.answer = says(one_call("llama3"))
        events = await rig.events("/v1/chat/completions", CHAT | {"tools": TOOLS})
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("form", [{"json": ANSWER}, {"json": json.dumps(ANSWER)}, {"json_object": True}])
def test_an_answer_keeps_to_its_format_and_calls_remain_possible(name: str, form: dict[str, Any]) -> None:
    """A format concerns only answers that are no calls, as in OpenAI's API. Agents always send both."""
    parsed = parse_chat(CHAT | {"tools": TOOLS, "structured_outputs": form})
    reading = prepare(parsed, ModelTools(FORMATS[name], {}), "id")
    assert reading is not None
    lark = parsed.requests[0].structured_output.lark
    assert '"city"' in lark
    assert "answer:" in lark
    assert ('"mood"' in lark) == ("json" in form)


@pytest.mark.parametrize("name", FORMATS)
def test_forced_calls_leave_no_answer_to_a_format(name: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": ANSWER}}
    parsed = parse_chat(CHAT | {"tools": TOOLS, "tool_choice": "required", "response_format": form})
    prepare(parsed, ModelTools(FORMATS[name], {}), "id")
    lark = parsed.requests[0].structured_output.lark
    assert '"city"' in lark
    assert '"mood"' not in lark


def test_what_is_wrong_with_a_grammar_of_forced_calls_is_wrong_with_the_tools() -> None:
    """The format beside them is not in the grammar. Without forced calls, both are."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": ANSWER}}
    text = {"format": {"type": "json_schema", "name": "a", "schema": ANSWER}}
    names = [
        parse_chat(CHAT | {"tools": TOOLS, "tool_choice": "required", "response_format": form}).names,
        parse_response({"input": "hi", "tools": RESPONSE_TOOLS, "tool_choice": "required", "text": text}).names,
        parse_message(
            MESSAGE | {"tools": MESSAGE_TOOLS, "tool_choice": {"type": "any"}, "output_config": {"format": FORMAT}}
        ).names,
    ]
    assert [each["structured_output.lark"] for each in names] == ["tools"] * 3
    assert "schema" in names[0]["structured_output.json_schema"]
    free = parse_chat(CHAT | {"tools": TOOLS, "response_format": form}).names
    assert free["structured_output.lark"] == "response_format.json_schema.schema"


@pytest.mark.parametrize(
    "schema",
    ['{"const": "a\\u0001"}', *('{"items":' * depth + "{}" + "}" * depth for depth in (101, *range(980, 1000)))],
    ids=lambda schema: str(len(schema)),
)
def test_a_schema_that_the_scheduler_refuses_reaches_it(schema: str) -> None:
    """Within the grammar of calls, a text would lose its control characters. A deep schema cannot be written there."""
    for several in (True, False):
        fields = {"tools": TOOLS, "parallel_tool_calls": several, "structured_outputs": {"json": schema}}
        parsed = parse_chat(CHAT | fields)
        prepare(parsed, ModelTools(FORMATS["hermes"], {}), "id")
        assert parsed.requests[0].structured_output.json_schema == schema


@pytest.mark.parametrize("form", [{"regex": "a"}, {"choice": ["a"]}, {"grammar": "start: /a/"}])
def test_other_grammars_are_of_the_whole_output(form: dict[str, Any]) -> None:
    parsed = parse_chat(CHAT | {"tools": TOOLS, "structured_outputs": form})
    before = parsed.requests[0].structured_output.SerializeToString()
    prepare(parsed, ModelTools(FORMATS["hermes"], {}), "id")
    assert parsed.requests[0].structured_output.SerializeToString() == before
    for fields in ({"tool_choice": "required"}, {"parallel_tool_calls": False}):
        with pytest.raises(ApiError) as raised:
            prepare(
                parse_chat(CHAT | {"tools": TOOLS, "structured_outputs": form} | fields),
                ModelTools(FORMATS["hermes"], {}),
                "id",
            )
        assert raised.value.param == "tools"


def test_tools_whose_names_no_grammar_can_write_have_no_format_beside_them() -> None:
    tools = [{"type": "function", "function": {"name": "get weather"}}]
    parsed = parse_chat(CHAT | {"tools": tools, "response_format": {"type": "json_object"}})
    with pytest.raises(ApiError) as raised:
        prepare(parsed, ModelTools(FORMATS["hermes"], {}), "id")
    assert raised.value.param == "tools"
    prepare(parse_chat(CHAT | {"tools": tools}), ModelTools(FORMATS["hermes"], {}), "id")
