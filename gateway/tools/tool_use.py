"""The tools of a request, and which of them the model may or must call."""

import re
from dataclasses import dataclass
from typing import Any

_WRITABLE = re.compile(r"[A-Za-z0-9_.-]{1,256}")


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool.

    parameters  the JSON schema of its arguments; None: any object
    is_strict   arguments must keep to the schema also where the model may choose
    """

    name: str
    parameters: dict[str, Any] | None = None
    is_strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request.

    is_read         calls are read from the text; False for the choice `none`
    is_forced       the whole output is calls
    allowed         the names of the tools that may be called; None: all
    allows_several  more than one call
    schema          the JSON schema that an answer without calls keeps to; None: any text
    """

    tools: tuple[Tool, ...]
    is_read: bool = True
    is_forced: bool = False
    allowed: frozenset[str] | None = None
    allows_several: bool = True
    schema: dict[str, Any] | None = None

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        return tuple(tool for tool in self.tools if self.allowed is None or tool.name in self.allowed)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self.callable_tools)

    @property
    def has_writable_names(self) -> bool:
        """True if a grammar in any format can write the names of the tools, and tell the tools apart."""
        names = [tool.name for tool in self.callable_tools]
        return all(map(_WRITABLE.fullmatch, names)) and len(set(names)) == len(names)

    @property
    def needs_grammar(self) -> bool:
        is_restricted = not self.allows_several or len(self.callable_tools) < len(self.tools) or self.schema is not None
        return self.is_read and (self.is_forced or is_restricted or any(tool.is_strict for tool in self.callable_tools))

    @property
    def has_no_text(self) -> bool:
        """True if the output is calls, or an answer that keeps to a schema, and no other text."""
        return self.is_forced or self.schema is not None
