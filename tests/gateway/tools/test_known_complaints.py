"""Users of other servers complain about these cases. The numbers are those of vLLM's issues unless named."""

import json

import pytest

from tests.gateway.tools.texts import calls, content, read, reasoning


def test_hermes_arguments_that_end_within_a_token() -> None:
    """10395, 9693: arguments were lost or repeated when braces arrived together."""
    parts = ["<tool_call>", '\n{"', 'name": "sum", "', 'arguments": {"', 'a": 1, "b": {"c": 2', "}}}", "\n</tool_call>"]
    assert calls(read("hermes", parts)) == [("sum", '{"a": 1, "b": {"c": 2}}')]


def test_hermes_list_of_objects() -> None:
    """21360: the token `[{"` was dropped."""
    parts = ['<tool_call>\n{"name": "calc", "arguments": {"numbers": ', '[{"', 'x": 1}, {"x": 2}]}}\n</tool_call>']
    assert calls(read("hermes", parts)) == [("calc", '{"numbers": [{"x": 1}, {"x": 2}]}')]


@pytest.mark.parametrize("end", ["", ', "arguments": {}', ', "arguments": null'])
def test_hermes_tool_without_parameters(end: str) -> None:
    """28806: empty arguments were dropped while streaming."""
    text = f'<tool_call>\n{{"name": "get_time"{end}}}\n</tool_call>'
    assert calls(read("hermes", list(text))) == [("get_time", "{}")]
    assert content(read("hermes", text)) == ""


def test_hermes_whole_call_in_one_delta() -> None:
    """19056, 10589: the name arrived without its arguments, or not at all."""
    text = '<tool_call>\n{"name": "f", "arguments": {"outline": [{"h2": "一、版本"}]}}\n</tool_call>'
    assert calls(read("hermes", text)) == [("f", '{"outline": [{"h2": "一、版本"}]}')]


def test_hermes_call_without_its_last_brace() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"a": 1}\n</tool_call>\n<tool_call>\n{"name": "g", "arguments": {}}'
    assert calls(read("hermes", text)) == [("f", '{"a": 1}'), ("g", "{}")]
    assert content(read("hermes", text)) == ""


def test_hermes_two_calls_in_one_block() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {}}\n{"name": "g", "arguments": {}}\n</tool_call>'
    assert calls(read("hermes", list(text))) == [("f", "{}"), ("g", "{}")]


def test_hermes_arguments_before_the_name() -> None:
    text = '<tool_call>{"arguments": {"a": "}"}, "name": "f"}</tool_call>'
    assert calls(read("hermes", list(text))) == [("f", '{"a": "}"}')]


def test_hermes_marker_within_a_string() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"html": "</tool_call><tool_call>"}}</tool_call>done'
    events = read("hermes", list(text))
    assert calls(events) == [("f", '{"html": "</tool_call><tool_call>"}')]
    assert content(events) == "done"


def test_hermes_text_between_and_after_calls() -> None:
    text = 'a <tool_call>{"name": "f", "arguments": {}}</tool_call> b <tool_call>no call</tool_call> c'
    events = read("hermes", list(text))
    assert calls(events) == [("f", "{}")]
    assert content(events) == "a b <tool_call>no call</tool_call> c".replace("a b", "a b")


def test_hermes_second_marker_after_a_broken_one() -> None:
    text = '<tool_call>\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert calls(read("hermes", list(text))) == [("f", "{}")]


@pytest.mark.parametrize("separator", ["; ", ";", ";\n", "\n", " ; ", "", ", "])
def test_llama_parallel_calls_with_any_separator(separator: str) -> None:
    """49923: the second call was corrupted unless the separator had two characters."""
    call = '{"name": "weather", "parameters": {"city": "Rome"}}'
    events = read("llama3", list(call + separator + call))
    assert calls(events) == [("weather", '{"city": "Rome"}')] * 2
    assert content(events) == ""


def test_llama_braces_in_text_after_a_call() -> None:
    """49923: braces after a call discarded it."""
    text = '{"name": "weather", "parameters": {}} I used {searchTool}; the args were {"query": "x"}'
    events = read("llama3", list(text))
    assert calls(events) == [("weather", "{}")]
    assert content(events) == ' I used {searchTool}; the args were {"query": "x"}'


def test_llama_python_tag() -> None:
    text = '<|python_tag|>{"type": "function", "name": "weather", "parameters": {"city": "Rome"}}'
    assert calls(read("llama3", list(text))) == [("weather", '{"city": "Rome"}')]
    assert content(read("llama3", '<|python_tag|>print("hi")')) == '<|python_tag|>print("hi")'


def test_json_that_names_no_offered_tool_is_content() -> None:
    """An answer in JSON is no call, although it has a name."""
    for text in ('{"name": "Ann", "parameters": {"age": 5}}', '{"name": "weather"}', '[{"name": "weather", "x": 1}]'):
        for name in ("llama3", "json"):
            assert content(read(name, list(text))) == text


def test_mistral_name_directly_before_the_arguments() -> None:
    """30651: Devstral's calls ended the request with a JSONDecodeError."""
    text = '[TOOL_CALLS]create_file{"filePath": "/a.txt", "content": "x"}'
    assert calls(read("mistral", list(text))) == [("create_file", '{"filePath": "/a.txt", "content": "x"}')]


def test_mistral_small_streams_several_calls() -> None:
    """20028: Small 3.2 could not stream calls."""
    text = '[TOOL_CALLS]f[CALL_ID]abc123DEF[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{"b": "[TOOL_CALLS]"}'
    assert calls(read("mistral", list(text))) == [("f", '{"a": 1}'), ("g", '{"b": "[TOOL_CALLS]"}')]


def test_mistral_parallel_calls_in_a_list() -> None:
    """11097: parallel calls were lost."""
    first, second = '{"name": "f", "arguments": {"a": "]"}}', '{"arguments": {}, "name": "g"}'
    text = f'[TOOL_CALLS] [{first}, {second}, {{"name": "h", "arguments": {{}}, "id": "x"}}]'
    assert calls(read("mistral", list(text))) == [("f", '{"a": "]"}'), ("g", "{}"), ("h", "{}")]
    assert content(read("mistral", text)) == ""


def test_harmony_channels_do_not_leak() -> None:
    """Markers and arguments appeared in the answer (odysseus 4522, Rapid-MLX 444 and 480, macprovider 743)."""
    text = (
        "<|channel|>analysis<|message|>We need the weather.<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "Let me see.<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        '{"city":"Tokyo"}'
    )
    events = read("harmony", list(text))
    assert reasoning(events) == "We need the weather."
    assert content(events) == "Let me see."
    assert calls(events) == [("weather", '{"city":"Tokyo"}')]


def test_harmony_call_in_the_analysis_channel() -> None:
    """Many calls of gpt-oss 120B stand there (dynamo 10366), and were shown as reasoning."""
    text = '<|channel|>analysis to=functions.grep code<|message|>{"pattern":"foo"}<|call|>'
    assert calls(read("harmony", list(text))) == [("grep", '{"pattern":"foo"}')]


def test_harmony_recipient_before_the_channel() -> None:
    text = ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}'
    assert calls(read("harmony", list(text))) == [("weather", '{"city": "Rome"}')]
    later = "<|channel|>final<|message|>a<|end|><|start|>assistant" + text
    assert calls(read("harmony", list(later))) == [("weather", '{"city": "Rome"}')]


def test_harmony_builtin_tools_are_reasoning() -> None:
    text = '<|channel|>commentary to=browser.search<|message|>{"q": 1}<|end|>'
    text += "<|start|>assistant<|channel|>final<|message|>x"
    events = read("harmony", text)
    assert calls(events) == []
    assert content(events) == "x"
    assert reasoning(events) == '{"q": 1}'


def test_arguments_stay_text() -> None:
    """Numbers, escapes and white space were changed by servers that parse arguments and write them again."""
    arguments = '{ "a":1.0,"b" : 1e400, "c":"\\u00e9\\/", "a":10000000000000000000000 }'
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert calls(read("hermes", list(text))) == [("f", arguments)]
    assert json.loads(arguments)
