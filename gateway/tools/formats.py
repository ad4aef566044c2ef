"""The formats by name, and which of them a chat template uses."""

from collections.abc import Mapping
from typing import Protocol

from gateway.tools.harmony import Harmony
from gateway.tools.hermes import Hermes
from gateway.tools.json_format import LLAMA3, PLAIN
from gateway.tools.mistral import Mistral
from gateway.tools.reader import Reader
from gateway.tools.tool_use import ToolUse


class ToolFormat(Protocol):
    """Reads and restricts the calls of a family of models.

    markers  texts that are one token in the vocabularies of most of its models
    passed   tokens of these vocabularies that have no meaning for calls, and are part of ordinary text
    """

    @property
    def name(self) -> str: ...

    @property
    def markers(self) -> tuple[str, ...]: ...

    @property
    def passed(self) -> tuple[str, ...]: ...

    def reader(self, use: ToolUse | None) -> Reader | None:
        """Returns a reader of one output of a request with these tools; None if its text has no structure."""

    def grammar(self, use: ToolUse, tokens: Mapping[str, int]) -> str:
        """Returns a grammar in the dialect of llguidance for these tools.

        tokens  the ids of `markers` and `passed` that are one token of the vocabulary
        """


FORMATS: Mapping[str, ToolFormat] = {each.name: each for each in (Hermes(), LLAMA3, Mistral(), Harmony(), PLAIN)}


def format_of(chat_template: str) -> ToolFormat:
    """Returns the format that a template shows to the model; JSON without markers if it is none of these."""
    if "<|channel|>" in chat_template and "<|message|>" in chat_template:
        return FORMATS["harmony"]
    if "[TOOL_CALLS]" in chat_template:
        return FORMATS["mistral"]
    if "<tool_call>" in chat_template and "<function=" not in chat_template:  # Qwen3-Coder's calls are XML
        return FORMATS["hermes"]
    if "<|python_tag|>" in chat_template or "<|start_header_id|>" in chat_template:
        return FORMATS["llama3"]
    return FORMATS["json"]
