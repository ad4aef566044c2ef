"""The formats of Mistral: `[TOOL_CALLS] [{"name": …, "arguments": {…}}]`, and later `[TOOL_CALLS]name[ARGS]{…}`."""

import re
from collections.abc import Mapping

from gateway.tools.events import Content, Markup
from gateway.tools.json_calls import JsonCallReader
from gateway.tools.lark import WHITE, Lark, json_head, literal, regex
from gateway.tools.reader import MAX_HELD, Steps
from gateway.tools.reader import WHITE as WHITE_CHARACTERS
from gateway.tools.tool_use import ToolUse

MARKER, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
KEY = ("arguments",)
_PLAIN = re.compile(r"[^\[ \t\n\r]+")
_IN_NAMES = re.compile(r"[\w.-]")


class MistralReader(JsonCallReader):
    """Accepts both forms, with and without `[ARGS]`, and an id between name and arguments."""

    def _read(self) -> Steps[None]:
        while (yield from self._find((MARKER,), _PLAIN)):
            num_marker = self._num_held
            piece = yield from self._skip_white()
            if piece == "[":
                is_call = yield from self._read_list(num_marker)
            elif piece == "{":
                is_call = yield from self._read_call(num_marker)
            else:
                is_call = yield from self._read_named(piece)
            if not is_call:
                self._rewind(max(num_marker, self._retry))
                self._send(Content)
            self._retry = 0

    def _read_list(self, num_marker: int) -> Steps[bool]:
        """Receives the list after its bracket. After its first call, what does not fit is left for what follows."""
        if (yield from self._skip_white()) != "{" or not (yield from self._read_call(num_marker)):
            return False
        while True:
            piece = yield from self._skip_white()
            if piece == "]":
                self._send(Markup)
                return True
            if piece != "," or (yield from self._skip_white()) != "{":
                break
            if not (yield from self._read_call(self._num_held)):
                break
        self._rewind(0)
        return True

    def _read_named(self, piece: str) -> Steps[bool]:
        name = ""
        while _IN_NAMES.fullmatch(piece) and self._num_held <= MAX_HELD:
            name += piece
            piece = yield None
        if not name:
            return False
        if piece == "[":
            found = yield from self._rest_of((ARGS, CALL_ID), piece)
            if found == CALL_ID:
                while (piece := (yield None)).isalnum() and self._num_held <= MAX_HELD:
                    pass
                found = (yield from self._rest_of((ARGS,), piece)) if piece == "[" else None
            if found is None:
                return False
            piece = yield None
        if piece in WHITE_CHARACTERS:
            piece = yield from self._skip_white()
        if piece != "{":
            return False
        yield from self._read_arguments(name)
        return True


class Mistral:
    """Mistral 7B 0.3, Nemo, Small, Large, Devstral, Magistral."""

    name = "mistral"
    markers = (MARKER, ARGS, CALL_ID)
    passed = ("[THINK]", "[/THINK]")

    def reader(self, use: ToolUse | None) -> MistralReader | None:
        return None if use is None or not use.is_read else MistralReader()

    def grammar(self, use: ToolUse, tokens: Mapping[str, int]) -> str:
        lark = Lark(tokens)
        begin = lark.marker(MARKER) if use.has_no_text else lark.opening(MARKER)
        tools = use.callable_tools
        arguments = [lark.add(f"arguments_{i}", lark.arguments(tool)) for i, tool in enumerate(tools)]
        items = [
            lark.add(f"item_{i}", f"{regex(WHITE + json_head(tool.name, KEY))} {arguments[i]} {regex(WHITE + '}')}")
            for i, tool in enumerate(tools)
        ]
        item = lark.add("item", " | ".join(items))
        rest = f"({regex(WHITE + ',')} {item})*" if use.allows_several else ""
        calls = [
            lark.add(f"call_{i}", f"{begin} {regex(literal(tool.name))} ({lark.marker(ARGS)})? {arguments[i]}")
            for i, tool in enumerate(tools)
        ]
        calls.append(lark.add("list", rf"{begin} {regex(WHITE + chr(92) + '[')} {item} {rest} {regex(WHITE + ']')}"))
        if use.has_no_text:
            return lark.only_calls(calls, use)
        return lark.free(calls, self.passed, use.allows_several)
