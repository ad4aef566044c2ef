"""The chat template tells the format."""

import pytest

from gateway.tools.formats import FORMATS, format_of

# Parts of the templates of well-known checkpoints.
TEMPLATES = {
    "hermes": '{{- \'\\n<tool_call>\\n{"name": "\' }}{{- tool_call.name }}{{- \'", "arguments": \' }}</tool_call>',
    "llama3": '{{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}{{- \'"parameters": \' }}',
    "mistral": '{{- "[TOOL_CALLS] [" }}{%- for tool_call in message["tool_calls"] %}',
    "harmony": '{{- "<|start|>assistant<|channel|>commentary to=functions." + tool_call.name + "<|message|>" }}',
    "json": "{% for message in messages %}{{ message.content }}{% endfor %}",
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_format_of_a_template(name: str) -> None:
    assert format_of(TEMPLATES[name]) is FORMATS[name]


def test_calls_in_xml_are_not_those_of_hermes() -> None:
    """Qwen3-Coder's template has the same outer marker."""
    assert format_of("<tool_call>\n<function=example_function_name>\n<parameter=x>").name == "json"


def test_no_template() -> None:
    assert format_of("").name == "json"
