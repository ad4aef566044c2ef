"""Writes grammars in the dialect of Lark that llguidance reads.

Its documentation: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md. For it, added tokens of a
vocabulary are never a part of a text: a marker that is such a token is written as `<[id]>`, and no text can contain it.
"""

import json
import re
from collections.abc import Mapping, Sequence

from gateway.tools.tool_use import Tool, ToolUse
from quire.grammar_options import JSON_OPTIONS
from quire.json_schemas import restated

WHITE = r"[ \t\r\n]{0,8}"
"""White space outside the arguments. It is bounded, because models may write it without end."""


class Lark:
    """Writes one grammar. `tokens` are the ids of the markers that are one token of the vocabulary."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = tokens
        self._rules = [r"TEXT: /(.|\n)*/", r"white: /[ \t\r\n]{1,8}/"]

    def add(self, name: str, body: str) -> str:
        """Adds a rule, and returns its name."""
        self._rules.append(f"{name}: {body}")
        return name.partition("[")[0]

    def marker(self, text: str) -> str:
        return f"<[{self._tokens[text]}]>" if text in self._tokens else json.dumps(text)

    def arguments(self, tool: Tool) -> str:
        """Returns what matches an object that keeps to the schema of a tool.

        Without `strict`, keywords of the schema that cannot be enforced are passed over.
        """
        schema = restated(dict(tool.parameters or {}), is_lenient=not tool.is_strict) | {
            "type": "object",
            "x-guidance": JSON_OPTIONS | {"lenient": not tool.is_strict},
        }
        return f"white? %json {json.dumps(schema)}"

    def answer(self, use: ToolUse, before: str = "") -> str:
        """Returns what may stand in place of all calls: nothing, or ` | ` and an answer that keeps to the schema.

        before  what the answer begins with
        """
        if use.is_forced or use.schema is None:
            return ""
        schema = restated(use.schema) | {"x-guidance": JSON_OPTIONS}
        return f" | {self.add('answer', f'{before} %json {json.dumps(schema)}')}"

    def only_calls(self, calls: Sequence[str], use: ToolUse) -> str:
        """Returns the grammar of one call, or of one and more, without text; or of an answer that keeps to a schema."""
        call = self.add("call", " | ".join(calls))
        return self.grammar((f"{call} (white? {call})*" if use.allows_several else call) + self.answer(use))

    def opening(self, marker: str) -> str:
        """Returns a rule for text that ends with its first marker, be it a token or spelled."""
        spelled = self.add("spelled[lazy]", f"TEXT {json.dumps(marker)}")
        token = f" | TEXT {self.marker(marker)}" if marker in self._tokens else ""
        return self.add("opening", spelled + token)

    def free(self, calls: Sequence[str], passed: Sequence[str], several: bool) -> str:
        """Returns the grammar of text with calls, each of which begins with the text before it.

        passed  tokens that text may contain
        """
        call = self.add("call", " | ".join(calls))
        tokens = " | ".join(self.marker(each) for each in passed if each in self._tokens)
        passage = self.add("passage", f"TEXT ({tokens})") if tokens else None
        if several:
            return self.grammar(f"({call}{f' | {passage}' if passage else ''})* TEXT")
        return self.grammar(f"{f'{passage}* ' if passage else ''}({call} | TEXT)")

    def grammar(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules, ""])


def regex(pattern: str) -> str:
    return f"/{pattern}/"


def literal(text: str) -> str:
    """Returns a pattern that matches only this text."""
    return re.sub(r"[^\w\s-]", lambda match: "\\" + match[0], text)


def json_head(name: str, keys: Sequence[str], before: str = "") -> str:
    """Returns a pattern of a call as a JSON object, up to the colon before its arguments, whose key is one of `keys`.

    before  a pattern of fields before the name
    """
    w = WHITE
    return rf'\{{{w}{before}"name"{w}:{w}{literal(json.dumps(name))}{w},{w}"({"|".join(keys)})"{w}:'
