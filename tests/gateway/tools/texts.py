"""Texts of models, and what readers make of them."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from gateway.tools.events import Arguments, CallStarted, Content, Event, Markup, Reasoning, merged
from gateway.tools.formats import FORMATS
from gateway.tools.tool_use import Tool, ToolUse

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = Tool("weather", CITY)
TIME = Tool("get_time", {"type": "object", "properties": {}, "additionalProperties": False})
USE = ToolUse((WEATHER, TIME))


def read(name: str, parts: str | Iterable[str], use: ToolUse | None = USE) -> list[Event]:
    """Returns the events of a text that arrives in these parts."""
    reader = FORMATS[name].reader(use)
    assert reader is not None
    events = [event for part in ([parts] if isinstance(parts, str) else parts) for event in reader.feed(part)]
    return merged([*events, *reader.end()])


def content(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Content))


def reasoning(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Reasoning))


def calls(events: Sequence[Event]) -> list[tuple[str, str]]:
    """Returns name and arguments of each call."""
    found = [[event.name, ""] for event in events if isinstance(event, CallStarted)]
    for event in events:
        if isinstance(event, Arguments):
            found[event.index][1] += event.text
    return [(name, arguments) for name, arguments in found]


def written(events: Sequence[Event]) -> str:
    """Returns the text of the model."""
    return "".join(
        event.text
        for event in events
        if isinstance(event, Content | Reasoning | Markup) or (isinstance(event, Arguments) and event.is_written)
    )


def one_call(name: str, arguments: str = '{"city": "Rome"}', tool: str = "weather") -> str:
    """Returns one call as the models of a format write it."""
    return {
        "hermes": f'<tool_call>\n{{"name": "{tool}", "arguments": {arguments}}}\n</tool_call>',
        "llama3": f'{{"name": "{tool}", "parameters": {arguments}}}',
        "mistral": f"[TOOL_CALLS]{tool}[ARGS]{arguments}",
        "harmony": f"<|channel|>commentary to=functions.{tool} <|constrain|>json<|message|>{arguments}<|call|>",
        "json": f'{{"name": "{tool}", "arguments": {arguments}}}',
    }[name]


def cuts(text: str, *positions: int) -> list[str]:
    edges = sorted({0, len(text), *(position % (len(text) + 1) for position in positions)})
    return [text[a:b] for a, b in pairwise(edges)]
