"""Bodies with long lists and maps are refused before the event loop looks at their items."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gateway.api import completions, messages, responses, sampling, structured_output
from gateway.api.anthropic import parse_message
from gateway.api.chat import parse_chat
from gateway.api.completions import MAX_PROMPTS, parse_completion
from gateway.api.errors import ApiError
from gateway.api.responses import parse_response
from gateway.api.tool_choice import MAX_TOOLS
from scheduler.requests.limits import RequestLimits

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT = {"messages": MESSAGES}
RESPONSE = {"input": "hi"}
MESSAGE = {"messages": MESSAGES, "max_tokens": 5}


class Counted(list[Any]):
    """A list that counts how many of its items were looked at."""

    num_seen = 0

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            self.num_seen += 1
            yield item


def refusal(parse: Callable[[object], object], body: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError, match="at most") as caught:
        parse(body)
    return caught.value


def test_bounds_are_those_of_the_scheduler() -> None:
    limits = RequestLimits()
    assert limits.max_num_stop == sampling.MAX_STOP
    assert limits.max_num_stop_token_ids == sampling.MAX_STOP_TOKEN_IDS
    assert limits.max_num_allowed_token_ids == sampling.MAX_ALLOWED_TOKEN_IDS
    assert limits.max_num_logit_bias == sampling.MAX_LOGIT_BIAS
    assert limits.max_num_choices == structured_output.MAX_CHOICES
    assert limits.max_chat_messages == messages.MAX_MESSAGES
    assert limits.max_num_tools == MAX_TOOLS


LISTS: list[tuple[Callable[[object], object], dict[str, Any], str, Any, int]] = [
    (parse_chat, CHAT, "stop", "a", 16),
    (parse_chat, CHAT, "stop_token_ids", 1, 64),
    (parse_chat, CHAT, "allowed_token_ids", 1, 65_536),
    (parse_message, MESSAGE, "stop_sequences", "a", 16),
]


@pytest.mark.parametrize(("parse", "body", "field", "item", "most"), LISTS, ids=[case[2] for case in LISTS])
def test_a_list_beyond_the_bound_of_the_scheduler_is_not_looked_at(
    parse: Callable[[object], object], body: dict[str, Any], field: str, item: Any, most: int
) -> None:
    parse(body | {field: [item] * most})
    items = Counted([item] * (most + 1))
    assert refusal(parse, body | {field: items}).param == field
    assert items.num_seen == 0


def test_tools_beyond_their_bound_are_not_looked_at() -> None:
    tools = Counted([{}] * (MAX_TOOLS + 1))
    assert refusal(parse_response, RESPONSE | {"tools": tools}).param == "tools"
    assert tools.num_seen == 0


@pytest.mark.parametrize(
    ("parse", "body", "field", "most"),
    [
        (parse_chat, CHAT, "chat_template_kwargs", messages.MAX_TEMPLATE_ARGUMENTS),
        (parse_response, RESPONSE, "metadata", responses.MAX_METADATA),
    ],
)
def test_maps_are_bounded(parse: Callable[[object], object], body: dict[str, Any], field: str, most: int) -> None:
    values = {f"name {i}": "a" for i in range(most)}
    parse(body | {field: values})
    assert refusal(parse, body | {field: values | {"more": "a"}}).param == field


SHARED: list[dict[str, Any]] = [
    {"allowed_token_ids": [1] * 65_536},
    {"logit_bias": {str(i): 1 for i in range(1024)}},
    {"structured_outputs": {"choice": ["a"] * 1024}},
    {"structured_outputs": {"regex": "a" * 100_000}},
    {"cache_salt": "a" * 100_000},
]


@pytest.mark.parametrize("shared", SHARED, ids=[next(iter(each)) for each in SHARED])
def test_prompts_do_not_multiply_large_fields(shared: dict[str, Any]) -> None:
    """Each prompt becomes a request with all fields: 1 MiB of them would become 256 MiB."""
    parse_completion({"prompt": ["a"] * 2} | shared)
    assert refusal(parse_completion, {"prompt": ["a"] * MAX_PROMPTS} | shared).param == "prompt"


def test_as_many_prompts_as_allowed_may_have_fields_of_an_ordinary_size() -> None:
    fields = {"stop": ["a"] * 16, "logit_bias": {str(i): 1 for i in range(300)}, "cache_salt": "a" * 8000}
    parsed = parse_completion({"prompt": ["a"] * MAX_PROMPTS} | fields)
    assert len(parsed.requests) == MAX_PROMPTS
    assert completions.MAX_COPIED_BYTES >= MAX_PROMPTS * 8000
