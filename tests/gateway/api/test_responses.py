"""The fields of the Responses API: what they become, and what is refused."""

import json
from typing import Any

import pytest

from gateway.api.endpoint import Head
from gateway.api.errors import ApiError
from gateway.api.responses import KNOWN, LOGPROBS, NEUTRAL, parse_response
from gateway.api.responses_answer import ResponseChunks, Settings
from quire.v1 import generation_pb2 as pb
from tests.support.gateway.fake_scheduler import finished, logprob, started

TOOL = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": False}
SEARCH = {"type": "web_search", "external_web_access": False}

USER = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}


def parse(**fields: Any) -> pb.GenerateRequest:
    (request,) = parse_response({"input": "hi"} | fields).requests
    return request


def refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    return caught.value


def test_scalar_fields_reach_the_scheduler() -> None:
    request = parse(temperature=0.5, top_p=0.25, max_output_tokens=7, include=[LOGPROBS], top_logprobs=3)
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.n) == (0.5, 0.25, 1)
    assert request.stopping.max_tokens == 7
    assert (request.output.logprobs, request.output.token_bytes) == (3, True)


def test_a_response_can_keep_its_cached_prompt_to_itself() -> None:
    assert parse(cache_salt="mine").cache_salt == "mine"


def test_a_conversation_becomes_a_chat() -> None:
    request = parse(
        instructions="Be brief.",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"type": "reasoning", "id": "r", "summary": []},
            {"type": "function_call", "id": "fc", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'},
            {"type": "function_call", "call_id": "c2", "name": "g", "arguments": ""},
            {"type": "function_call_output", "call_id": "c1", "output": "one"},
            {
                "type": "message",
                "role": "assistant",
                "id": "msg_1",
                "status": "completed",
                "phase": "final_answer",
                "content": [{"type": "output_text", "text": "c", "annotations": [], "logprobs": []}],
            },
            {"type": "message", "role": "developer", "content": "d"},
        ],
        tools=[TOOL],
    )
    messages = request.chat.messages
    assert [(m.role, m.content) for m in messages] == [
        ("system", "Be brief."), ("user", "a\nb"), ("assistant", ""), ("tool", "one"), ("assistant", "c"),
        ("system", "d"),
    ]  # fmt: skip
    assert [(c.id, c.name, c.arguments) for c in messages[2].tool_calls] == [("c1", "f", '{"x": 1}'), ("c2", "g", "{}")]
    assert messages[3].tool_call_id == "c1"
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert [json.loads(tool) for tool in request.chat.tools] == [{"type": "function", "function": function}]
    assert parse(tools=[TOOL], tool_choice="none").chat.tools


def test_a_refusal_of_another_server_is_what_the_assistant_said() -> None:
    part = {"type": "refusal", "refusal": "no"}
    assert parse(input=[USER, {"role": "assistant", "content": [part]}]).chat.messages[1].content == "no"
    assert refused(input=[USER | {"content": [part]}]).param == "input[0].content[0].type"


def test_arguments_that_are_no_json_object_can_be_sent_back() -> None:
    chat = parse(input=[USER, CALL | {"arguments": '{"city": "Ro'}]).chat
    assert json.loads(chat.messages[1].tool_calls[0].arguments) == {"invalid_json": '{"city": "Ro'}


def thought(*texts: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text} for text in texts]
    return {"id": "rs_1", "type": "reasoning", "status": "completed", "summary": [], "content": content}


def test_a_thought_comes_with_what_the_assistant_has_written_after_it() -> None:
    output = {"type": "function_call_output", "call_id": "c1", "output": "one"}
    answer = {"role": "assistant", "content": "c"}
    items = [USER, thought("x"), CALL, thought("y"), CALL, output, thought("z"), answer, thought("lost"), USER, answer]
    messages = parse(input=items).chat.messages
    assert [(m.role, m.reasoning_content) for m in messages] == [
        ("user", ""), ("assistant", "x\ny"), ("tool", ""), ("assistant", "z"), ("user", ""), ("assistant", ""),
    ]  # fmt: skip
    hidden = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "s"}], "content": None}
    for empty in (hidden, thought(), hidden | {"encrypted_content": "e"}):
        assert not parse(input=[USER, empty, answer]).chat.messages[1].HasField("reasoning_content")
    assert refused(input=[thought("a") | {"content": [{"type": "image"}]}, answer]).param == "input[0].content[0].type"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": "\ud800"}, "input"),
        ({"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"input": [USER, CALL | {"arguments": {}}]}, "input[1].arguments"),
        ({"input": [USER, CALL | {"name": ""}]}, "input[1].name"),
        ({"input": [{"role": "user", "content": "x", "mood": 1}]}, "input[0].mood"),
        ({"input": [{"role": "assistant", "content": "x", "phase": "encore"}]}, "input[0].phase"),
        ({"input": [{"role": "user", "content": "x"}] * 1025}, "input"),
        ({"safety_identifier": 5}, "safety_identifier"),
        ({"prompt_cache_key": ["k"]}, "prompt_cache_key"),
        ({"tools": [{"type": "file_search"}]}, "tools[0].type"),
        ({"tools": [SEARCH], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [SEARCH], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tools": [TOOL | {"strict": 1}]}, "tools[0].strict"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"metadata": 5}, "metadata"),
        ({"metadata": {"a": "b", "c": 1}}, "metadata.c"),
        ({"metadata": {"a": ["x"]}}, "metadata.a"),
        ({"metadata": {"a": "\ud800"}}, "metadata.a"),
        ({"stream_options": {"x": 1}}, "stream_options.x"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"reasoning": {"effort": 5}}, "reasoning.effort"),
        ({"reasoning": {"effort": "low", "summary": "detailed"}}, "reasoning.summary"),
        ({"reasoning": {"depth": 3}}, "reasoning.depth"),
        ({"reasoning": "high"}, "reasoning"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, Any], param: str) -> None:
    error = refused(**fields)
    assert (error.status, error.param) == (400, param)


def test_values_that_change_nothing_are_accepted() -> None:
    for name, values in NEUTRAL.items():
        for value in values:
            assert parse(**{name: value}) == parse()
    assert parse(user="me", store=True, service_tier="auto", include=["reasoning.encrypted_content"]) == parse()
    assert parse(client_metadata={"x-codex-installation-id": "i"}) == parse()


def test_an_offered_search_of_the_web_is_never_used() -> None:
    assert parse(tools=[SEARCH], tool_choice="auto") == parse()
    assert parse(tools=[SEARCH, TOOL]) == parse(tools=[TOOL])


def test_what_an_answer_repeats_can_be_sent_again() -> None:
    collector = parse_response({"input": "Hi"}).collector(Head("resp_1", "tiny", 0), ())
    repeated = {name: value for name, value in collector.body().items() if name in KNOWN}
    assert {"tool_choice", "tools", "text", "reasoning"} <= repeated.keys()
    assert parse(**repeated) == parse(temperature=1, top_p=1)


def test_a_null_within_an_object_is_an_absent_field() -> None:
    assert parse(reasoning={"effort": None}) == parse(reasoning={"effort": None, "summary": None}) == parse()
    assert parse(metadata={"a": None}) == parse()


def test_the_effort_of_reasoning_is_a_variable_of_the_template() -> None:
    request = parse(reasoning={"effort": "low", "summary": "auto"})
    assert dict(request.chat.template_arguments) == {"reasoning_effort": '"low"'}


def test_empty_instructions_are_no_message() -> None:
    assert parse(instructions="") == parse()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"include": [{}]}, "include[0]"),
        ({"metadata": {"\ud800": "a"}}, "metadata"),
        ({"tools": [TOOL | {"parameters": {"type": "object", "x": float("inf")}}]}, "tools"),
    ],
)
def test_what_the_answer_could_not_repeat_is_refused(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


@pytest.mark.parametrize(
    "deltas",
    [
        [("a", [b"a"]), ("b", [b"b"])],
        [("ab", [b"a", b"b"]), ("", [b"</s>"])],  # EOS has no text
        [("", [b"\xc3"]), ("é", [b"\xa9"]), ("b", [b"b"])],  # parts of a character wait for its last one
        [("a", [b"a"]), ("", [b"\xc3"])],  # which does not come
        [("", [b"\xc3"])],
        [],
    ],
)
def test_a_stream_gives_the_log_probabilities_of_every_token_once(deltas: list[tuple[str, list[bytes]]]) -> None:
    chunks = ResponseChunks(Head("resp_1", "m", 0), Settings(has_logprobs=True, repeated={}))
    messages = [started()]
    for text, tokens in deltas:
        entries = [logprob(1, -0.5, token) for token in tokens]
        messages.append(pb.GenerateResponse(delta=pb.Delta(text=text, token_ids=[1] * len(tokens), logprobs=entries)))
    messages.append(finished(0, 1))
    stream = "".join([*(chunks.encode(0, message) for message in messages), chunks.end()])
    events = [json.loads(line.removeprefix("data: ")) for line in stream.splitlines() if line.startswith("data: ")]
    parts = [event for event in events if event["type"] == "response.output_text.delta"]
    (done,) = [event for event in events if event["type"] == "response.output_text.done"]
    expected = [list(token) for _, tokens in deltas for token in tokens]
    assert [each["bytes"] for part in parts for each in part["logprobs"]] == expected
    assert [each["bytes"] for each in done["logprobs"]] == expected
    assert [each["bytes"] for each in chunks.body()["output"][0]["content"][0]["logprobs"]] == expected
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
