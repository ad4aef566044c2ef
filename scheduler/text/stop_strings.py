"""Finds the first stop string in a text that arrives in pieces, and holds back as little text as possible."""

from collections.abc import Sequence


class StopMatcher:
    """Matches the stop strings of one output.

    The first match is the one that is complete first; if several are completed by the same character, it is the
    longest. The result therefore does not depend on how the text was split. The output ends before the stop
    string, or after it with `include_stop`. Text that may still become a stop string is held back: at most the length
    of the longest stop string minus one.

    The search starts with the text of token number `min_tokens`.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False, min_tokens: int = 0) -> None:
        self._needles = [_Needle(stop) for stop in stops]
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._held = ""
        self.num_tokens = 0
        """Number of tokens fed, up to and including the one that completed a stop string."""
        self.has_matched = False

    def feed(self, text: str) -> str:
        """Takes the next token's text, which may be empty, and returns the text that can be sent now.

        Must not be called after a match.
        """
        self.num_tokens += 1
        if self.num_tokens < self._min_tokens:
            return text
        return self._match(text)

    def flush(self, text: str = "") -> str:
        """Ends the output with a text that belongs to no token, and returns the text that was held back."""
        certain = self._match(text)
        if self.has_matched:
            return certain
        held, self._held = self._held, ""
        return certain + held

    def _match(self, text: str) -> str:
        window = self._held + text
        matches = [(end, -len(needle.text)) for needle in self._needles if (end := needle.advance(text)) is not None]
        if matches:
            self.has_matched = True
            end, minus_length = min(matches)
            self._held = ""
            return window[: len(window) - len(text) + end + (0 if self._include_stop else minus_length)]
        num_held = max([needle.num_matched for needle in self._needles], default=0)
        self._held = window[len(window) - num_held :]
        return window[: len(window) - num_held]


class _Needle:
    """One stop string and how much of it the text ends with: the automaton of Knuth, Morris and Pratt (1977).

    The cost is linear in the text for every stop string, so no client can slow down the server by its choice of them.
    """

    __slots__ = ("_borders", "num_matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        self._borders = _borders(text)

    def advance(self, text: str) -> int | None:
        """Returns where in `text` the first match ends. Without a match, returns None and updates num_matched."""
        needle, borders, matched = self.text, self._borders, self.num_matched
        first = needle[0]
        position = 0
        while position < len(text):
            if matched == 0:
                position = text.find(first, position)
                if position < 0:
                    break
            character = text[position]
            while matched and needle[matched] != character:
                matched = borders[matched]
            if needle[matched] == character:
                matched += 1
            position += 1
            if matched == len(needle):
                return position
        self.num_matched = matched
        return None


def _borders(text: str) -> list[int]:
    """Returns for k up to len(text) the length of the longest proper prefix of text[:k] that is also its suffix."""
    borders = [0] * (len(text) + 1)
    border = 0
    for k in range(1, len(text)):
        while border and text[border] != text[k]:
            border = borders[border]
        if text[border] == text[k]:
            border += 1
        borders[k + 1] = border
    return borders
