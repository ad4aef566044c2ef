"""Finds out which tokens of an answer its messages consist of, if it has thoughts and calls as well."""

import codecs
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class _Token:
    """One token.

    entry     its log-probabilities
    num_left  characters that it completes, and that no event has covered
    is_taken  a message has it
    """

    entry: dict[str, Any]
    num_left: int
    is_taken: bool = False


class MessageLogprobs:
    """Holds the log-probabilities of tokens until the event with their text arrives.

    Tokens and events are parts of the same text, so their lengths tell which belong together. A message gets every
    token with a part of its text:

        Hm.│ b.│</think>│\\n\\nYes│.│      tokens; the message gets the last two
         thought │ markup    │message
    """

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._tokens = deque[_Token]()
        self._spaced: _Token | None = None  # the first token, if it begins with a space and no text has arrived
        self._has_begun = False
        self._num_held = 0  # characters that have arrived, and that no event has covered

    def add(self, text: str, entries: Iterable[dict[str, Any]]) -> None:
        """Adds the text and the tokens of a delta."""
        self._num_held += len(text)
        for entry in entries:
            completed = self._utf8.decode(bytes(entry["bytes"]))
            self._tokens.append(_Token(entry, len(completed)))
            if completed and not self._has_begun:
                self._has_begun = True
                self._spaced = self._tokens[-1] if completed.startswith(" ") else None
        if text and self._spaced is not None:
            if not text.startswith(" "):  # some tokenizers drop the space before the first word of a text
                self._spaced.num_left -= 1
            self._spaced = None

    def cover(self, text: str, *, is_message: bool = False) -> list[dict[str, Any]]:
        """Takes the text of the next event. Returns the log-probabilities that a message gets with it."""
        self._num_held -= len(text)
        num_characters = len(text)
        taken = []
        while num_characters and self._tokens:
            token = self._tokens[0]
            if is_message and not token.is_taken:
                taken.append(token.entry)
                token.is_taken = True
            num_covered = min(num_characters, token.num_left)
            num_characters -= num_covered
            token.num_left -= num_covered
            if not token.num_left:
                self._tokens.popleft()
        return taken

    def rest(self, *, is_end: bool = False) -> list[dict[str, Any]]:
        """Takes the tokens that are left when all text is covered, such as EOS, whose name is not in the text.

        is_end  no more text arrives; before, the first parts of a character wait for its last one
        """
        rest = []
        while self._tokens and not self._num_held and (is_end or any(token.num_left for token in self._tokens)):
            token = self._tokens.popleft()
            if not token.is_taken:
                rest.append(token.entry)
        return rest
