"""Every field of both endpoints: what it becomes in the request to the scheduler, and what is refused."""

from typing import Any

import pytest

from gateway.api.chat import CHAT_NEUTRAL, KNOWN, parse_chat
from gateway.api.completions import COMPLETION_NEUTRAL, parse_completion
from gateway.api.completions import KNOWN as COMPLETION_KNOWN
from gateway.api.errors import ApiError
from gateway.api.sampling import IGNORED
from quire.v1 import generation_pb2 as pb

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> pb.GenerateRequest:
    (request,) = parse_chat({"messages": MESSAGES} | fields).requests
    return request


def completion(**fields: Any) -> pb.GenerateRequest:
    (request,) = parse_completion({"prompt": "hi"} | fields).requests
    return request


def value_at(message: Any, path: str) -> Any:
    for name in path.split("."):
        message = getattr(message, name)
    return message


SHARED: list[tuple[dict[str, Any], str, Any]] = [
    ({"temperature": 0.5}, "sampling.temperature", 0.5),
    ({"temperature": 0}, "sampling.temperature", 0.0),
    ({"top_p": 0.25}, "sampling.top_p", 0.25),
    ({"min_p": 0.125}, "sampling.min_p", 0.125),
    ({"top_k": 5}, "sampling.top_k", 5),
    ({"top_k": -1}, "sampling.top_k", 0),
    ({"repetition_penalty": 1.5}, "sampling.repetition_penalty", 1.5),
    ({"frequency_penalty": -1}, "sampling.frequency_penalty", -1.0),
    ({"presence_penalty": 0.5}, "sampling.presence_penalty", 0.5),
    ({"seed": 7}, "sampling.seed", 7),
    ({"seed": -1}, "sampling.seed", 2**64 - 1),
    ({"seed": 2**64 - 1}, "sampling.seed", 2**64 - 1),
    ({"n": 3}, "sampling.n", 3),
    ({}, "sampling.n", 1),
    ({"logit_bias": {"5": 1, "7": -2.5}}, "sampling.logit_bias", {5: 1.0, 7: -2.5}),
    ({"allowed_token_ids": [4, 5]}, "sampling.allowed_token_ids", [4, 5]),
    ({"beam_width": 4, "n": 2}, "sampling.beam_width", 4),
    ({"use_beam_search": True, "n": 3}, "sampling.beam_width", 3),
    ({"use_beam_search": False, "n": 3}, "sampling.beam_width", 0),
    ({"length_penalty": 0.5}, "sampling.length_penalty", 0.5),
    ({"early_stopping": True}, "sampling.early_stopping", True),
    ({"max_tokens": 9}, "stopping.max_tokens", 9),
    ({"min_tokens": 2}, "stopping.min_tokens", 2),
    ({"stop": "."}, "stopping.stop", ["."]),
    ({"stop": [".", "!"]}, "stopping.stop", [".", "!"]),
    ({"stop_token_ids": [1, 2]}, "stopping.stop_token_ids", [1, 2]),
    ({"ignore_eos": True}, "stopping.ignore_eos", True),
    ({"include_stop_str_in_output": True}, "stopping.include_stop", True),
    ({"prompt_logprobs": 2}, "output.prompt_logprobs", 2),
    ({"prompt_logprobs": 2}, "output.token_bytes", True),
    ({"priority": -3}, "priority", -3),
    ({"cache_salt": "s"}, "cache_salt", "s"),
    ({"request_id": "r"}, "request_id", "r"),
    ({"response_format": {"type": "json_object"}}, "structured_output.json_object", True),
    ({"structured_outputs": {"regex": "a"}}, "structured_output.regex", "a"),
    ({"n": 2.0}, "sampling.n", 2),  # as JavaScript may write it
]


@pytest.mark.parametrize(("fields", "path", "value"), SHARED, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("parse", [chat, completion])
def test_shared_fields(parse: Any, fields: dict[str, Any], path: str, value: Any) -> None:
    assert value_at(parse(**fields), path) == value


@pytest.mark.parametrize(
    ("fields", "path", "value"),
    [
        ({"max_completion_tokens": 5}, "stopping.max_tokens", 5),
        ({"max_completion_tokens": 5, "max_tokens": 9}, "stopping.max_tokens", 5),
        ({"logprobs": True}, "output.logprobs", 0),
        ({"logprobs": True, "top_logprobs": 3}, "output.logprobs", 3),
        ({"logprobs": True}, "output.token_bytes", True),
        ({"chat_template_kwargs": {"a": {"b": 1}}}, "chat.template_arguments", {"a": '{"b": 1}'}),
        ({"add_generation_prompt": False}, "chat.template_arguments", {"add_generation_prompt": "false"}),
        ({"add_generation_prompt": True}, "chat.template_arguments", {}),
        ({"reasoning_effort": "low"}, "chat.template_arguments", {"reasoning_effort": '"low"'}),
        ({"continue_final_message": True}, "chat.continue_final_message", True),
        (
            {"continue_final_message": True, "add_generation_prompt": False},
            "chat.continue_final_message",
            True,
        ),
    ],
)
def test_fields_of_chats(fields: dict[str, Any], path: str, value: Any) -> None:
    assert value_at(chat(**fields), path) == value


def test_absent_fields_stay_absent_so_that_the_checkpoint_decides() -> None:
    nulls = {"temperature": None, "stop": None, "tools": None, "stream": None}
    for request in (chat(), chat(**nulls, logit_bias=None), chat(**nulls, logit_bias={"5": None})):
        assert not request.HasField("output")
        assert [field.name for field, _ in request.sampling.ListFields()] == ["n"]
        assert not request.stopping.HasField("max_tokens")
        assert not request.HasField("priority")


def test_no_top_logprobs_need_no_logprobs() -> None:
    assert chat(top_logprobs=0) == chat()


def test_every_known_field_is_in_these_tables() -> None:
    shared = {name for fields, _, _ in SHARED for name in fields}
    others = {"model", "stream", "stream_options"}
    assert KNOWN - shared - others == {
        *("messages", "max_completion_tokens", "logprobs", "top_logprobs", "tools", "tool_choice"),
        *(
            "parallel_tool_calls",
            "chat_template_kwargs",
            "reasoning_effort",
            "continue_final_message",
            "add_generation_prompt",
        ),
    }
    assert COMPLETION_KNOWN - shared - others == {"prompt", "echo", "logprobs", "best_of"}


@pytest.mark.parametrize("name", sorted(IGNORED))
def test_fields_that_cannot_change_the_text_are_ignored(name: str) -> None:
    assert chat(**{name: {"x": 1}}) == chat()
    assert completion(**{name: "x"}) == completion()


@pytest.mark.parametrize("name", sorted(CHAT_NEUTRAL))
def test_unsupported_fields_of_chats_are_refused_unless_they_ask_for_nothing(name: str) -> None:
    for value in CHAT_NEUTRAL[name]:
        assert chat(**{name: value}) == chat()
    assert refused(parse_chat, {"messages": MESSAGES, name: {"other": 1}}) == name


@pytest.mark.parametrize("name", sorted(COMPLETION_NEUTRAL))
def test_unsupported_fields_of_completions_are_refused_unless_they_ask_for_nothing(name: str) -> None:
    for value in COMPLETION_NEUTRAL[name]:
        assert completion(**{name: value}) == completion()
    assert refused(parse_completion, {"prompt": "a", name: {"other": 1}}) == name


def test_the_default_verbosity_changes_nothing_and_others_are_refused() -> None:
    """The Responses API has the same rule for `text.verbosity`."""
    assert chat(verbosity="medium") == chat()
    assert refused(parse_chat, {"messages": MESSAGES, "verbosity": "low"}) == "verbosity"


def refused(parse: Any, body: Any) -> str | None:
    """Returns the field that the error names."""
    with pytest.raises(ApiError) as raised:
        parse(body)
    assert (raised.value.status, raised.value.kind) == (400, "invalid_request_error")
    return raised.value.param


NO_NUMBERS: list[Any] = ["1", True, [], {}, float("nan"), float("inf"), 10**400]
WRONG: dict[str, list[Any]] = {
    **dict.fromkeys(("temperature", "top_p", "min_p"), NO_NUMBERS),
    **dict.fromkeys(("repetition_penalty", "frequency_penalty", "presence_penalty"), NO_NUMBERS),
    "length_penalty": ["x", {}],
    "top_k": ["1", True, 1.5, -2, 2**32],
    "seed": ["1", True, 0.5, 2**64, -(2**63) - 1],
    "n": ["1", True, 1.5, -1, 2**32],
    "max_tokens": ["1", True, 1.5, -1, 2**32],
    "min_tokens": ["1", -1],
    "beam_width": ["4", -1],
    "use_beam_search": [1, "true"],
    "early_stopping": ["never", 1],
    "stop": [5, [5], {}],
    "stop_token_ids": ["1", ["1"], [-1], [2**32], [True], [1.5]],
    "allowed_token_ids": [5, [None]],
    "ignore_eos": [1, "yes"],
    "include_stop_str_in_output": [0],
    "logit_bias": [[], "x", 5],
    "prompt_logprobs": [True, -1, "1"],
    "priority": [1.5, 2**31],
    "cache_salt": [5, ["x"]],
    "request_id": [5],
    "model": [5, []],
    "stream": ["true", 1],
    "stream_options": [5, []],
}


@pytest.mark.parametrize("name", sorted(WRONG))
def test_wrong_types_are_refused_with_the_name_of_the_field(name: str) -> None:
    for value in WRONG[name]:
        for parse, body in ((parse_chat, {"messages": MESSAGES}), (parse_completion, {"prompt": "a"})):
            param = refused(parse, body | {name: value})
            assert param is not None
            assert param.partition("[")[0] == name, value


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"max_tokens": "abc", "max_completion_tokens": 1}, "max_tokens"),
        ({"logprobs": 5}, "logprobs"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": "5"}, "top_logprobs"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": 1}}, "stream_options.continuous_usage_stats"),
        ({"stream": True, "stream_options": {"include_obfuscation": 1}}, "stream_options.include_obfuscation"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"reasoning_effort": 5}, "reasoning_effort"),
        ({"add_generation_prompt": "no"}, "add_generation_prompt"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"logit_bias": {"x": 1}}, "logit_bias[x]"),
        ({"logit_bias": {"-1": 1}}, "logit_bias[-1]"),
        ({"logit_bias": {"5": "x"}}, "logit_bias[5]"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": MESSAGES * 1025}, "messages"),
        ({"temprature": 1}, "temprature"),
    ],
)
def test_what_a_chat_may_not_say(fields: dict[str, Any], param: str) -> None:
    assert refused(parse_chat, {"messages": MESSAGES} | fields) == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": ["a", 5]}, "prompt[1]"),
        ({"prompt": ["a", None]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [[1], [True]]}, "prompt[1][0]"),
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"echo": 1}, "echo"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 3, "n": 2, "beam_width": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"messages": MESSAGES}, "messages"),
    ],
)
def test_what_a_completion_may_not_say(fields: dict[str, Any], param: str) -> None:
    assert refused(parse_completion, {"prompt": "a"} | fields) == param


def test_every_bad_field_is_named() -> None:
    with pytest.raises(ApiError) as raised:
        parse_chat({"messages": [{"role": "cat", "content": 5}], "n": "x", "nope": 1})
    for name in ("messages[0].role", "n:", "nope"):
        assert name in raised.value.message


def test_a_body_with_very_many_unknown_fields_has_a_short_error() -> None:
    with pytest.raises(ApiError) as raised:
        parse_chat({"messages": MESSAGES} | {f"field{i}" * 100: i for i in range(10_000)})
    assert len(raised.value.message) < 3000


def test_lengths_of_completions() -> None:
    assert completion().stopping.max_tokens == 16
    assert completion(max_tokens=0, echo=True).stopping.max_tokens == 1
    assert completion(echo=True, logprobs=2).output.prompt_logprobs == 2
    assert not completion(echo=True).output.HasField("prompt_logprobs")
