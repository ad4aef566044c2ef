"""Readers find calls in any text, however it is cut, and lose no character."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.tools.formats import FORMATS
from gateway.tools.tool_use import ToolUse
from tests.gateway.tools.texts import USE, WEATHER, calls, content, cuts, one_call, read, reasoning, written

NAMES = sorted(FORMATS)
ROME = ("weather", '{"city": "Rome"}')
PIECES = [
    "<tool_call>", "</tool_call>", "<tool_", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[TOOL", "<|python_tag|>",
    "<|channel|>", "<|message|>", "<|end|>", "<|start|>assistant", "<|call|>", "analysis", "final",
    "commentary to=functions.weather",
    " to=", '{"name"', '"name": "weather"', '"name": "other"', '"arguments": ', '"parameters": ', '"id": "1"', "{", "}",
    "[", "]", '"', "\\", ":", ",", ";", " ", "\n", "null", "weather", '{"city": "Rome"}', "é😀", "<", "x",
]  # fmt: skip
VALUES = st.recursive(st.text(max_size=16) | st.integers() | st.none(), st.lists, max_leaves=6)
ARGUMENTS = st.dictionaries(st.text(max_size=16), VALUES, max_size=4)
MANY = [
    '{"name": ', '{"arguments": ', '{"name": "weather", "arguments": ', "{", "<", "[", " ", "; ",
    '{"name": "' + "x" * 9_000, "<tool_call>", "[TOOL_CALLS]", "[TOOL_CALLS]" + "x" * 9_000, "<|channel|>", '{"a": {',
    "<|channel|>analysis<|message|>",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES), max_size=24).map("".join)


@pytest.mark.parametrize("name", NAMES)
def test_one_call(name: str) -> None:
    events = read(name, one_call(name))
    assert calls(events) == [ROME]
    assert content(events) == ""


@pytest.mark.parametrize("name", NAMES)
def test_several_calls_with_text_before_them(name: str) -> None:
    several = (one_call(name), one_call(name, "{}", "get_time"), one_call(name, '{"a": [1, {"b": "}"}]}'))
    text = "I look it up.\n" + "\n".join(several)
    events = read(name, text)
    assert calls(events) == [ROME, ("get_time", "{}"), ("weather", '{"a": [1, {"b": "}"}]}')]
    assert content(events) == "I look it up."


@pytest.mark.parametrize("name", NAMES)
def test_text_without_calls_is_content(name: str) -> None:
    text = ' \nif a < b { return "x[0]" }\n\n {"name": "Ann"} [TOOL CALLS] <tool>\n '
    assert content(read(name, text)) == text


@pytest.mark.parametrize("name", NAMES)
def test_arguments_arrive_while_they_are_written(name: str) -> None:
    reader = FORMATS[name].reader(USE)
    assert reader is not None
    text = one_call(name, '{"city": "Rome or Paris"}')
    middle = text.index("Paris")
    assert calls(reader.feed(text[:middle])) == [("weather", '{"city": "Rome or ')]
    assert calls(read(name, text)) == [("weather", '{"city": "Rome or Paris"}')]


@pytest.mark.parametrize("name", NAMES)
def test_each_beginning_of_a_call_keeps_its_text(name: str) -> None:
    text = "Hi. " + one_call(name, r'{"city": "R\"{\\o\u006de"}')
    for end in range(len(text)):
        events = read(name, text[:end])
        assert written(events) == text[:end]
        arguments = "".join(arguments for _, arguments in calls(events))
        if name == "harmony":  # its markers are tokens, which arrive whole; a message without text means no arguments
            arguments = arguments.partition("<")[0].replace("{}", "")
        assert r'{"city": "R\"{\\o\u006de"}'.startswith(arguments)


@settings(max_examples=400)
@given(text=TEXTS, positions=st.lists(st.integers(0, 400), max_size=12))
@pytest.mark.parametrize("name", NAMES)
def test_no_cut_changes_the_events(name: str, text: str, positions: list[int]) -> None:
    events = read(name, text)
    assert written(events) == text
    assert read(name, cuts(text, *positions)) == events
    assert read(name, list(text)) == events


@settings(max_examples=100)
@given(text=st.text(max_size=200))
@pytest.mark.parametrize("name", NAMES)
def test_any_text_is_read(name: str, text: str) -> None:
    """Readers raise nothing, whatever a model writes."""
    assert written(read(name, text)) == text
    assert written(read(name, one_call(name, "{" + text))) == one_call(name, "{" + text)


@settings(max_examples=100)
@given(arguments=ARGUMENTS, is_ascii=st.booleans(), indent=st.sampled_from([None, 2]))
@pytest.mark.parametrize("name", NAMES)
def test_any_arguments_are_passed_on_as_written(
    name: str, arguments: dict[str, object], is_ascii: bool, indent: int | None
) -> None:
    written_as = json.dumps(arguments, ensure_ascii=is_ascii, indent=indent)
    if name == "harmony" and "<|" in written_as:
        return  # its markers end a message wherever they stand
    assert calls(read(name, list(one_call(name, written_as)))) == [("weather", written_as)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("piece", MANY, ids=lambda piece: piece[:24])
def test_long_texts_are_read_in_linear_time(name: str, piece: str) -> None:
    """A reader that goes back for each piece would take hours."""
    text = piece * (2**16 // len(piece))
    assert written(read(name, text)) == text
    begun = one_call(name).partition('"city"')[0] + text
    assert written(read(name, begun)) == begun


@pytest.mark.parametrize("name", NAMES)
def test_a_quarter_of_a_mebibyte(name: str) -> None:
    text = one_call(name, '{"city": "' + "Rome " * 2**15 + '"}') + " " * 2**15 + "\n{<[" * 2**13
    assert written(read(name, text)) == text
    parts = [text[i : i + 3] for i in range(0, len(text), 3)]
    assert written(read(name, parts)) == text


@pytest.mark.parametrize("name", NAMES)
def test_deeply_nested_arguments(name: str) -> None:
    arguments = '{"a": ' * 20_000 + "1" + "}" * 20_000
    assert calls(read(name, one_call(name, arguments))) == [("weather", arguments)]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "harmony"])
def test_the_choice_none_reads_nothing(name: str) -> None:
    assert FORMATS[name].reader(ToolUse((WEATHER,), is_read=False)) is None
    assert FORMATS[name].reader(None) is None


def test_channels_are_read_without_tools() -> None:
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi!"
    for use in (None, ToolUse((WEATHER,), is_read=False)):
        events = read("harmony", text, use)
        assert (reasoning(events), content(events)) == ("Hm.", "Hi!")
    assert content(read("harmony", one_call("harmony"), None)) == '{"city": "Rome"}'
