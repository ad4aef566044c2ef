"""The format of Hermes and Qwen: `<tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call>`."""

import re
from collections.abc import Mapping

from gateway.tools.events import Content, Markup
from gateway.tools.json_calls import JsonCallReader
from gateway.tools.lark import WHITE, Lark, json_head, regex
from gateway.tools.reader import Steps
from gateway.tools.tool_use import ToolUse

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY = ("arguments",)
_PLAIN = re.compile(r"[^< \t\n\r]+")


class HermesReader(JsonCallReader):
    """Accepts several calls in one block, and a block without its end."""

    def _read(self) -> Steps[None]:
        while (yield from self._find((OPEN,), _PLAIN)):
            num_marker = self._num_held
            if (yield from self._skip_white()) == "{" and (yield from self._read_call(num_marker)):
                yield from self._read_rest_of_block()
            else:
                self._rewind(max(num_marker, self._retry))
                self._send(Content)
            self._retry = 0

    def _read_rest_of_block(self) -> Steps[None]:
        while True:
            piece = yield from self._skip_white()
            if piece == "{" and (yield from self._read_call(self._num_held)):
                continue
            if piece == CLOSE[0] and (yield from self._rest_of((CLOSE,), piece)):
                self._send(Markup)
                return
            self._rewind(0)
            return


class Hermes:
    """Qwen 2.5 and 3, Hermes 2 Pro and 3, and models trained on their template."""

    name = "hermes"
    markers = (OPEN, CLOSE)
    passed = ("<think>", "</think>")

    def reader(self, use: ToolUse | None) -> HermesReader | None:
        return None if use is None or not use.is_read else HermesReader()

    def grammar(self, use: ToolUse, tokens: Mapping[str, int]) -> str:
        lark = Lark(tokens)
        begin = lark.marker(OPEN) if use.has_no_text else lark.opening(OPEN)
        end = f"{regex(WHITE + '}' + WHITE)} {lark.marker(CLOSE)}"
        calls = [
            lark.add(f"call_{i}", f"{begin} {regex(WHITE + json_head(tool.name, KEY))} {lark.arguments(tool)} {end}")
            for i, tool in enumerate(use.callable_tools)
        ]
        if use.has_no_text:
            return lark.only_calls(calls, use)
        return lark.free(calls, self.passed, use.allows_several)
