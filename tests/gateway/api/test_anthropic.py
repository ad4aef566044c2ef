"""The fields of Anthropic's API: what they become, and what is refused."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from gateway.api.anthropic import NEUTRAL, parse_count, parse_message
from gateway.api.anthropic_answer import MessageCollector, error_body
from gateway.api.endpoint import Head
from gateway.api.errors import ApiError
from gateway.api.tool_calls import ModelTools, ToolReading
from gateway.tools.formats import FORMATS
from quire.v1 import generation_pb2 as pb

TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
USER = {"role": "user", "content": "hi"}
CALL = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}


def parse(**fields: Any) -> pb.GenerateRequest:
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    (request,) = parse_message(body | fields).requests
    return request


def test_scalar_fields_reach_the_scheduler() -> None:
    request = parse(temperature=0.5, top_p=0.25, top_k=7, stop_sequences=["x", "y"], metadata={"user_id": "u"})
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (0.5, 0.25, 7)
    assert (list(request.stopping.stop), request.stopping.max_tokens) == (["x", "y"], 5)


def test_a_message_can_keep_its_cached_prompt_to_itself() -> None:
    assert parse(cache_salt="mine").cache_salt == "mine"


def test_blocks_become_messages() -> None:
    request = parse(
        system=[{"type": "text", "text": "Be"}, {"type": "text", "text": "brief.", **EPHEMERAL}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "c"},
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "one"}]},
                    {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
                    {"type": "text", "text": "d"},
                ],
            },
        ],
        tools=[TOOL | EPHEMERAL],
    )
    chat = request.chat
    assert [(m.role, m.content, m.tool_call_id) for m in chat.messages] == [
        ("system", "Be\nbrief.", ""), ("user", "a\nb", ""), ("assistant", "c", ""), ("tool", "one", "t1"),
        ("tool", "", "t2"), ("user", "d", ""),
    ]  # fmt: skip
    assert chat.messages[2].reasoning_content == "hm"
    assert [(c.id, c.name, json.loads(c.arguments)) for c in chat.messages[2].tool_calls] == [("t1", "f", {"x": 1})]
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert [json.loads(tool) for tool in chat.tools] == [{"type": "function", "function": function}]
    assert not chat.continue_final_message
    assert parse(tools=[TOOL], tool_choice={"type": "none"}).chat.tools


@pytest.mark.parametrize(
    "parse_chat", [lambda **fields: parse(**fields).chat, lambda **fields: parse_count(fields)[1].chat]
)
def test_a_call_may_say_that_the_model_made_it(parse_chat: Callable[..., pb.ChatPrompt]) -> None:
    """Blocks of answers do, and clients send them back."""
    call = {"type": "tool_use", "id": "t1", "name": "f", "input": {}, "caller": {"type": "direct"}}
    chat = parse_chat(messages=[{"role": "assistant", "content": [call]}])
    assert [(c.id, c.name) for c in chat.messages[0].tool_calls] == [("t1", "f")]
    call["caller"] = {"type": "code_execution_20250825", "tool_id": "srvtoolu_1"}
    with pytest.raises(ApiError) as caught:
        parse_chat(messages=[{"role": "assistant", "content": [call]}])
    assert caught.value.param == "messages[0].content[0].caller"


@pytest.mark.parametrize("effort", ["low", "medium", "high", "max"])
def test_the_effort_is_a_variable_of_the_template(effort: str) -> None:
    """The other two APIs have this variable too. It changes the prompt, so it is counted."""
    config = {"effort": effort, "format": {"type": "json_schema", "schema": {"type": "object"}}}
    wanted = {"reasoning_effort": json.dumps(effort)}
    assert dict(parse(output_config=config).chat.template_arguments) == wanted
    assert dict(parse_count({"messages": [USER], "output_config": config})[1].chat.template_arguments) == wanted
    assert dict(parse(output_config={}).chat.template_arguments) == {}


def test_a_system_message_is_refused_in_the_words_that_claude_code_knows() -> None:
    """It looks for them in the text of a 400, and sends the request again without such messages."""
    with pytest.raises(ApiError) as caught:
        parse(messages=[USER, {"role": "system", "content": "Be brief."}])
    assert (caught.value.status, caught.value.param) == (400, "messages[1].role")
    assert "role 'system' is not supported on this model" in caught.value.message


def turns(**fields: Any) -> list[str]:
    """Returns the thoughts of three turns, of which the second one has two."""
    blocks = [{"type": "tool_result", "tool_use_id": "t1", "content": "one"}, {"type": "text", "text": "Go on."}]
    result = {"role": "user", "content": blocks}

    def said(text: str, block: dict[str, Any]) -> dict[str, Any]:
        return {"role": "assistant", "content": [{"type": "thinking", "thinking": text, "signature": ""}, block]}

    answer = {"type": "text", "text": "yes"}
    messages = [
        USER,
        said("a", answer),
        USER,
        said("b", CALL),
        result,
        said("c", answer),
        USER,
        said("d", answer),
        USER,
    ]
    request = {"messages": messages, "context_management": fields}
    counted = parse_count(request)[1].chat
    assert parse(**request).chat == counted
    return [message.reasoning_content for message in counted.messages if message.role == "assistant"]


def test_what_claude_code_says_about_itself_is_ignored() -> None:
    said = {"metadata": {"user_id": "u"}, "diagnostics": {"previous_message_id": "msg_1"}}
    assert parse(**said) == parse()
    assert parse_count({"messages": [USER]} | said) == parse_count({"messages": [USER]})


def test_prompts_of_claude_code_begin_alike() -> None:
    """The line for the bill differs in each request; without it, the prompt before is cached."""
    bill = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch=36ee5;"
    plain = parse(system="Be brief.")
    assert parse(system=[{"type": "text", "text": bill}, {"type": "text", "text": "Be brief."}]) == plain
    assert parse(system=f"{bill}\nBe brief.") == plain
    assert parse(system=bill) == parse()
    assert parse(system=f"Be brief.\n{bill}").chat.messages[0].content == f"Be brief.\n{bill}"


def test_the_scope_of_a_cache_changes_nothing() -> None:
    block = {"type": "text", "text": "Be brief."}
    shared = block | {"cache_control": {"type": "ephemeral", "scope": "global", "ttl": "1h"}}
    assert parse(system=[shared]) == parse(system=[block])


def test_thoughts_of_earlier_turns_can_be_cleared() -> None:
    """Claude Code asks with each request to keep all, and after a pause to keep one turn's."""
    edit = {"type": "clear_thinking_20251015"}
    for nothing in (
        {},
        {"edits": []},
        {"edits": [edit | {"keep": "all"}]},
        {"edits": [edit | {"keep": {"type": "all"}}]},
    ):
        assert turns(**nothing) == ["a", "b", "c", "d"]
    for one in (edit, edit | {"keep": {"type": "thinking_turns", "value": 1}}):
        assert turns(edits=[one]) == ["", "", "", "d"]
    assert turns(edits=[edit | {"keep": {"type": "thinking_turns", "value": 2}}]) == ["", "b", "c", "d"]


@pytest.mark.parametrize(
    ("edit", "param"),
    [
        ({"type": "clear_tool_uses_20250919"}, "context_management.edits[0].type"),
        ({"type": "clear_thinking_20251015", "keep": 5}, "context_management.edits[0].keep"),
        (
            {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 0}},
            "context_management.edits[0].keep.value",
        ),
        (
            {"type": "clear_thinking_20251015", "keep": {"type": "tool_uses", "value": 3}},
            "context_management.edits[0].keep.type",
        ),
        (
            {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "turns": 3}},
            "context_management.edits[0].keep.turns",
        ),
        ({"type": "clear_thinking_20251015", "trigger": 5}, "context_management.edits[0].trigger"),
    ],
)
def test_other_edits_are_refused(edit: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse(context_management={"edits": [edit]})
    assert caught.value.param == param


def test_an_answer_continues_a_last_message_of_the_assistant() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I"}]
    assert parse(messages=messages).chat.continue_final_message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}] * 1025}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [USER, {"role": "assistant", "content": [CALL | {"name": ""}]}]}, "messages[1].content[0].name"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "x", "name": "n"}]}, "messages[0].name"),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"stop_sequences": [5]}, "stop_sequences[0]"),
        ({"tools": [{"type": "bash_20250124", "name": "b"}]}, "tools[0].type"),
        ({"tools": [{}]}, "tools[0].name"),
        ({"tools": [TOOL | {"name": ""}]}, "tools[0].name"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1023}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"thinking": {"type": "disabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display"),
        ({"thinking": {}}, "thinking.type"),
        ({"thinking": True}, "thinking"),
        ({"cache_control": {"type": "forever"}}, "cache_control"),
        ({"speed": "fast"}, "speed"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_values_that_change_nothing_are_accepted() -> None:
    for name, values in NEUTRAL.items():
        for value in values:
            assert parse(**{name: value}) == parse()
    assert parse(cache_control={"type": "ephemeral", "ttl": None}) == parse()


@pytest.mark.parametrize("system", ["", [], [{"type": "text", "text": ""}]])
def test_an_empty_system_prompt_is_no_message(system: object) -> None:
    assert parse(system=system) == parse()


@pytest.mark.parametrize("ttl", ["5m", "1h", None])
def test_how_long_a_prompt_is_cached_changes_nothing(ttl: str | None) -> None:
    cached = {"cache_control": {"type": "ephemeral", "ttl": ttl}}
    content = [{"type": "text", "text": "hi"} | cached]
    assert parse(messages=[{"role": "user", "content": content}], tools=[TOOL | cached]) == parse(tools=[TOOL])


def test_fields_of_tools_that_ask_for_what_is_done_anyway_change_nothing() -> None:
    asked = {"eager_input_streaming": True, "defer_loading": False, "allowed_callers": ["direct"]}
    assert parse(tools=[TOOL | asked]) == parse(tools=[TOOL])
    with pytest.raises(ApiError) as caught:
        parse(tools=[TOOL | {"defer_loading": True}])
    assert caught.value.param == "tools[0].defer_loading"


def test_thinking_is_a_variable_of_the_template() -> None:
    assert parse(thinking={"type": "adaptive"}) == parse()
    assert parse(thinking={"type": "adaptive", "display": "summarized"}) == parse()
    assert parse(thinking={"type": "disabled"}).chat.template_arguments == {"enable_thinking": "false"}
    budget = {"type": "enabled", "budget_tokens": 1024}
    assert parse(thinking=budget).chat.template_arguments == {"enable_thinking": "true"}


def test_tokens_are_counted_of_the_chat_that_an_answer_would_have() -> None:
    prompt = {
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I"}],
        "system": "Be brief.",
        "tools": [TOOL],
        "tool_choice": {"type": "any"},
        "thinking": {"type": "disabled"},
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
    }
    model, counted = parse_count(prompt | {"model": "m"})
    assert model == "m"
    answered_too = {name: value for name, value in prompt.items() if name != "output_config"}
    assert counted.chat == parse(**answered_too).chat


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 5}, "max_tokens"),
        ({"stream": True}, "stream"),
        ({"messages": []}, "messages"),
        ({"tools": [{}]}, "tools[0].name"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
    ],
)
def test_bad_fields_of_a_count_are_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_count({"messages": [{"role": "user", "content": "hi"}]} | fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def answered(stop: list[str], texts: list[str], reason: pb.FinishReason) -> dict[str, Any]:
    collector = MessageCollector(Head("msg_1", "m", 0), stop)
    for text in texts:
        collector.add(0, pb.GenerateResponse(delta=pb.Delta(text=text, token_ids=[1])))
    collector.add(0, pb.GenerateResponse(finished=pb.Finished(reason=reason)))
    return collector.body()


@pytest.mark.parametrize(
    ("stop", "texts", "text", "found"),
    [
        (["END"], ["a ", "b END"], "a b ", "END"),
        (["b", "ab"], ["x", "ab"], "x", "ab"),
        (["b"], ["b"], "", "b"),
        ([], ["a"], "a", None),
        (["END"], ["a"], "a", None),
    ],
)
def test_the_answer_names_the_stop_sequence_without_containing_it(
    stop: list[str], texts: list[str], text: str, found: str | None
) -> None:
    body = answered(stop, texts, pb.FINISH_REASON_STOP if found else pb.FINISH_REASON_EOS)
    assert body["content"] == [{"type": "text", "text": text, "citations": None}]
    assert body["stop_sequence"] == found
    assert body["stop_reason"] == ("stop_sequence" if found else "end_turn")


@pytest.mark.parametrize(
    ("text", "token_id", "shown", "found"),
    [
        ("Yes.<|im_end|>", 7, "Yes.", None),
        ("<|im_end|>", 7, "", None),
        ("Yes.", 7, "Yes.", None),  # a special token has no text
        ("<|im_end|>", 8, "<|im_end|>", None),  # the model has spelled it
        ("Yes.END", 8, "Yes.", "END"),
    ],
)
@pytest.mark.parametrize("tools", [None, ToolReading(ModelTools(FORMATS["harmony"], {}), None, "id")])
def test_the_name_of_an_eos_token_is_no_text(
    text: str, token_id: int, shown: str, found: str | None, tools: ToolReading | None
) -> None:
    """Some checkpoints do not mark it as a special token. It may be in the text because the stop sequence has to be."""
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], "stop_sequences": ["END", "STOP"]}
    head = Head("msg_1", "m", 0, tools, {7: "<|im_end|>"})
    collector = parse_message(body).collector(head, ())
    collector.add(0, pb.GenerateResponse(delta=pb.Delta(text=text, token_ids=[1, token_id])))
    collector.add(0, pb.GenerateResponse(finished=pb.Finished(reason=pb.FINISH_REASON_EOS)))
    answer = collector.body()
    assert "".join(block["text"] for block in answer["content"]) == shown
    assert answer["stop_sequence"] == found


def test_an_answer_of_full_length_says_so() -> None:
    assert answered([], ["a"], pb.FINISH_REASON_LENGTH)["stop_reason"] == "max_tokens"


def test_a_thread_is_refused_with_the_details_after_which_clients_send_the_whole_conversation() -> None:
    with pytest.raises(ApiError) as raised:
        parse(thread={"type": "create"})
    error = error_body(raised.value)["error"]
    assert error["details"]["error_code"] == "thread_unsupported_request"
    assert parse(thread=None) == parse()
