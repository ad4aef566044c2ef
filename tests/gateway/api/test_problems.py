"""Errors stay short, and are made in a short time, however many problems a body has."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.api.anthropic import parse_count, parse_message
from gateway.api.chat import parse_chat
from gateway.api.completions import parse_completion
from gateway.api.errors import ApiError
from gateway.api.fields import MAX_PROBLEMS
from gateway.api.responses import parse_response

MESSAGES = [{"role": "user", "content": "hi"}]


class Counted(list[Any]):
    """A list that counts the items that were read."""

    num_read = 0

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            self.num_read += 1
            yield item


@pytest.mark.parametrize(
    ("parse", "body", "path"),
    [
        (parse_chat, {"messages": [{"role": "user"}]}, ("messages", 0, "content")),
        (parse_chat, {"messages": [{"role": "assistant"}]}, ("messages", 0, "tool_calls")),
        (parse_chat, {"messages": MESSAGES}, ("stop",)),
        (parse_message, {"max_tokens": 1, "messages": [{"role": "user"}]}, ("messages", 0, "content")),
        (parse_message, {"max_tokens": 1, "messages": MESSAGES}, ("system",)),
        (parse_message, {"max_tokens": 1, "messages": MESSAGES}, ("stop_sequences",)),
        (parse_response, {"input": [{"role": "user"}]}, ("input", 0, "content")),
        (parse_response, {"input": "x"}, ("include",)),
        (parse_response, {}, ("input",)),
    ],
)
@pytest.mark.parametrize("item", [1, {"type": "image"}])
def test_a_list_with_very_many_bad_items_has_a_short_error(
    parse: Any, body: dict[str, Any], path: tuple[Any, ...], item: object
) -> None:
    """Only the items that the error names are looked at."""
    items = Counted([item] * 1000)
    body = copy.deepcopy(body)
    *holders, name = path
    holder: Any = body
    for each in holders:
        holder = holder[each]
    holder[name] = items
    with pytest.raises(ApiError) as raised:
        parse(body)
    assert raised.value.message.count("; ") < MAX_PROBLEMS
    assert len(raised.value.message) < 3000
    assert items.num_read <= MAX_PROBLEMS + 1


@pytest.mark.parametrize(
    ("parse", "body"),
    [
        (parse_chat, {"messages": MESSAGES}),
        (parse_completion, {"prompt": "x"}),
        (parse_response, {"input": "x"}),
        (parse_message, {"max_tokens": 1, "messages": MESSAGES}),
        (parse_count, {"messages": MESSAGES}),
    ],
)
@pytest.mark.parametrize("model", [5, ["x"], {"a": 1}, False, "\ud800"])
def test_the_model_has_to_be_a_text(parse: Any, body: dict[str, Any], model: object) -> None:
    with pytest.raises(ApiError) as raised:
        parse(body | {"model": model})
    assert raised.value.param == "model"


def test_an_unknown_field_is_found_behind_any_number_of_null_fields() -> None:
    nulls = dict.fromkeys(f"field{i}" for i in range(1000))
    parse_chat({"messages": MESSAGES} | nulls)
    with pytest.raises(ApiError) as raised:
        parse_chat(nulls | {"messages": MESSAGES, "temprature": 1})
    assert raised.value.param == "temprature"


def test_an_unknown_field_without_a_name_is_named_too() -> None:
    with pytest.raises(ApiError) as raised:
        parse_chat({"messages": MESSAGES, "": 1})
    assert raised.value.param == '""'
    assert raised.value.message.startswith('"": ')


def test_problems_of_objects_count_too() -> None:
    with pytest.raises(ApiError) as raised:
        parse_chat({"messages": MESSAGES, "tools": [1] * 128})
    assert raised.value.message.count("; ") < MAX_PROBLEMS
