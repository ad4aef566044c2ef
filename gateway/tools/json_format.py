"""The formats without a marker: the answer itself is a JSON object with the name of an offered tool."""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from gateway.tools.events import Content
from gateway.tools.json_calls import ARGUMENTS, JsonCallReader
from gateway.tools.lark import WHITE, Lark, json_head, regex
from gateway.tools.reader import WHITE as WHITE_CHARACTERS
from gateway.tools.reader import Steps
from gateway.tools.tool_use import ToolUse

PYTHON_TAG = "<|python_tag|>"
_PLAIN = re.compile(r"[^<{ \t\n\r]+")
_BEFORE = rf'("(type|id)"{WHITE}:{WHITE}"[^"\\]*"{WHITE},{WHITE})*'


class JsonReader(JsonCallReader):
    """Finds calls anywhere in a text. Calls may be separated by semicolons or commas, and follow `<|python_tag|>`."""

    separators = WHITE_CHARACTERS | {";", ","}

    def __init__(self, names: Collection[str], marker: str | None) -> None:
        self._markers = ("{",) if marker is None else (marker, "{")
        super().__init__(names)

    def _read(self) -> Steps[None]:
        while marker := (yield from self._find(self._markers, _PLAIN)):
            num_marker = self._num_held
            begins = marker == "{" or (yield from self._skip_white()) == "{"
            if begins and (yield from self._read_call(self._num_held)):
                yield from self._skip_separators()
            else:
                self._rewind(max(num_marker, self._retry))
                self._send(Content)
            self._retry = 0


@dataclass(frozen=True, slots=True)
class JsonFormat:
    """A format of JSON objects.

    key        the field of the arguments that the model has learned; both are read
    separator  what the model writes between two calls
    marker     a token that may stand before the calls
    """

    name: str
    key: str
    separator: str
    marker: str | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        return () if self.marker is None else (self.marker,)

    @property
    def passed(self) -> tuple[str, ...]:
        return (*self.markers, "<think>", "</think>")

    def reader(self, use: ToolUse | None) -> JsonReader | None:
        return None if use is None or not use.is_read else JsonReader(use.names, self.marker)

    def grammar(self, use: ToolUse, tokens: Mapping[str, int]) -> str:
        lark = Lark(tokens)
        bodies = [f"{lark.arguments(tool)} {regex(WHITE + '}')}" for tool in use.callable_tools]
        if use.has_no_text:
            begin = f"{lark.marker(self.marker)}?" if self.marker else ""
            # Beside an answer that is JSON as well, no token of JSON may go on where its own token would end.
            heads = [
                regex(json_head(tool.name, (self.key,))) if use.is_forced else _json_tokens(tool.name, self.key)
                for tool in use.callable_tools
            ]
            calls = [lark.add(f"call_{i}", f"{head} {bodies[i]}") for i, head in enumerate(heads)]
            first = lark.add("first", f"{begin} ({' | '.join(calls)})")
            rest = f" ({json.dumps(self.separator)} ({' | '.join(calls)}))*" if use.allows_several else ""
            return lark.grammar(f"{first}{rest}{lark.answer(use)}")
        heads = [regex(r"(.|\n)*" + json_head(tool.name, ARGUMENTS, _BEFORE)) for tool in use.callable_tools]
        opens = [lark.add(f"open_{i}[lazy]", head) for i, head in enumerate(heads)]
        calls = [lark.add(f"call_{i}", f"{begin} {bodies[i]}") for i, begin in enumerate(opens)]
        return lark.free(calls, self.passed, use.allows_several)


def _json_tokens(name: str, key: str) -> str:
    """Returns the tokens of a call up to the colon before its arguments."""
    tokens = ("{", '"name"', ":", json.dumps(name), ",", json.dumps(key), ":")
    return " white? ".join(map(json.dumps, tokens))


LLAMA3 = JsonFormat("llama3", "parameters", "; ", PYTHON_TAG)
PLAIN = JsonFormat("json", "arguments", "\n")
