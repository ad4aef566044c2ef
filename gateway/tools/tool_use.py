"""The tools of a request, and which of them the model may or must call."""

from dataclasses import dataclass
from typing import Any


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
    """

    tools: tuple[Tool, ...]
    is_read: bool = True
    is_forced: bool = False
    allowed: frozenset[str] | None = None
    allows_several: bool = True

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        return tuple(tool for tool in self.tools if self.allowed is None or tool.name in self.allowed)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self.callable_tools)

    @property
    def needs_grammar(self) -> bool:
        is_restricted = not self.allows_several or len(self.callable_tools) < len(self.tools)
        return self.is_read and (self.is_forced or is_restricted or any(tool.is_strict for tool in self.callable_tools))
