"""Reads calls of tools and thoughts from the texts of one answer, in the format of the served model."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256

from gateway.tools.events import CallStarted, Content, Event, Markup, Reasoning
from gateway.tools.formats import ToolFormat
from gateway.tools.reader import Reader
from gateway.tools.thoughts import ThoughtReader, ThoughtTags
from gateway.tools.tool_use import ToolUse

GRAMMAR_NAMES = {f"structured_output{field}": "tools" for field in ("", ".lark")}
"""The JSON field to which the scheduler's complaints about a grammar belong."""


def names_of_forced(use: ToolUse | None) -> dict[str, str]:
    """Returns names for errors that replace those of a response format, which no grammar of forced calls contains."""
    return GRAMMAR_NAMES if use is not None and use.is_forced else {}


@dataclass(frozen=True, slots=True)
class ModelTools:
    """The format of a model.

    tokens      the ids of its markers that are one token of the vocabulary
    thoughts    the tags of its thoughts; None if its template shows none
    eos_tokens  the name of each EOS token
    """

    format: ToolFormat
    tokens: Mapping[str, int]
    thoughts: ThoughtTags | None = None
    eos_tokens: Mapping[int, str] = field(default_factory=dict)


class ToolReading:
    """Makes the readers of one answer.

    thoughts   tags of the thought that the answer can begin with; None if it cannot
    is_within  the prompt has opened the thought
    """

    def __init__(
        self,
        tools: ModelTools,
        use: ToolUse | None,
        request_id: str,
        thoughts: ThoughtTags | None = None,
        *,
        is_within: bool = False,
    ) -> None:
        self._format = tools.format
        self._use = use
        self._request_id = request_id
        self._thoughts = thoughts
        self._is_within = is_within

    def reader(self, *, has_markup: bool = False) -> "ChoiceReader":
        """Returns a new reader. `has_markup`: its events include those of markup."""
        reader = self._format.reader(self._use)
        if self._thoughts is not None:
            reader = ThoughtReader(self._thoughts, reader, is_within=self._is_within)
        if reader is None:
            raise ValueError("the text of this answer has no structure")
        return ChoiceReader(reader, has_markup=has_markup)

    def call_id(self, prefix: str, choice: int, call: int) -> str:
        """Returns the id of a call. Templates of Mistral accept only ids of nine letters and digits."""
        digest = sha256(f"{self._request_id}/{choice}/{call}".encode()).hexdigest()
        return digest[:9] if self._format.name == "mistral" else f"{prefix}{digest[:24]}"


class ChoiceReader:
    """Reads one choice.

    has_markup            returned events include those of markup
    has_calls             a call has begun
    num_reasoning_tokens  tokens of thoughts. Tokens of a text that is held, or is markup, count with the text after it,
                          and tokens of one piece of text count with its beginning.
    """

    def __init__(self, reader: Reader, *, has_markup: bool = False) -> None:
        self._reader = reader
        self._has_markup = has_markup
        self._num_held_tokens = 0
        self.has_calls = False
        self.num_reasoning_tokens = 0

    def feed(self, text: str, num_tokens: int) -> list[Event]:
        """Returns the events of the next piece of text, which has `num_tokens` tokens."""
        self._num_held_tokens += num_tokens
        return self._shown(self._reader.feed(text))

    def end(self) -> list[Event]:
        return self._shown(self._reader.end())

    def _shown(self, events: list[Event]) -> list[Event]:
        shown: list[Event] = [event for event in events if not isinstance(event, Markup)]
        if shown:
            self.has_calls = self.has_calls or any(isinstance(event, CallStarted) for event in shown)
            if isinstance(shown[0], Reasoning):
                self.num_reasoning_tokens += self._num_held_tokens
            self._num_held_tokens = 0
        return events if self._has_markup else shown


class PlainText:
    """Reads one choice whose text has no structure."""

    has_calls = False
    num_reasoning_tokens = 0

    def feed(self, text: str, num_tokens: int) -> list[Event]:
        return [Content(text)] if text else []

    def end(self) -> list[Event]:
        return []
