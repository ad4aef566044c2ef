"""Reads calls that are a JSON object with the name of the tool and its arguments."""

import json
from collections.abc import Collection

from gateway.tools.events import Arguments, Markup
from gateway.tools.reader import MAX_HELD, Reader, Steps

ARGUMENTS = ("arguments", "parameters")
_KEYS = frozenset({"name", "type", "id", *ARGUMENTS})


class _TooLong(Exception):
    """More text would be held than the bound allows."""


class JsonCallReader(Reader):
    """The base of readers for these formats.

    names  the tools that can be called; None: any. A format without a marker needs them, because other JSON can look
           like a call
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        self._names = names
        self._retry = 0  # after a failure, text from here on can still be a call
        super().__init__()

    def _read_call(self, num_marker: int) -> Steps[bool]:
        """Receives an object after its first brace. Returns False if it is no call; then all of it is still held, and
        may begin again after the first `_retry` characters.

        num_marker  the held characters in which nothing can begin
        """
        self._retry = num_marker
        try:
            return (yield from self._read_head())
        except _TooLong:
            self._retry = MAX_HELD  # where the failure is noticed depends on how the text was divided
            return False

    def _read_head(self) -> Steps[bool]:
        name: str | None = None
        early: tuple[int, int] | None = None  # where arguments stand that came before the name
        is_empty = self._names is None
        while True:
            key = yield from self._read_key()
            if key is None:
                return False
            value = yield from self._skip_white()
            if key in ARGUMENTS and value == "{" and early is None:
                if name is not None:
                    yield from self._read_arguments(name)
                    yield from self._read_tail()
                    return True
                begin = self._num_held - 1
                yield from self._read_object(self._check_held)
                early = (begin, self._num_held)
                self._retry = self._num_held  # a part of this is no call of its own
            elif key in ARGUMENTS and value == "n":
                if (yield from self._rest_of(("null",), value)) is None:
                    return False
                is_empty = True
            elif key not in ARGUMENTS and value == '"':
                text = yield from self._read_text()
                if text is None or (key == "name" and not self._is_name(text)):
                    return False
                name = text if key == "name" else name
            else:
                return False
            following = yield from self._skip_white()
            if following == "}" and name is not None and (early is not None or is_empty):
                self._send_call(name, early)
                return True
            if following != ",":
                return False

    def _is_name(self, text: str) -> bool:
        return bool(text) and (self._names is None or text in self._names)

    def _send_call(self, name: str, early: tuple[int, int] | None) -> None:
        """Sends a call whose object is complete."""
        if early is None:
            self._start_empty_call(name)
            return
        begin, end = early
        self._send(Markup, begin)
        index = self._start_call(name)
        self._send(lambda text: Arguments(index, text), end - begin)
        self._send(Markup)

    def _read_tail(self) -> Steps[None]:
        """Receives the rest of the object after its arguments. What does not fit is left for what follows."""
        while True:
            piece = yield from self._skip_white()
            if piece == "}":
                self._send(Markup)
                return
            if piece != "," or (yield from self._read_key()) in (None, *ARGUMENTS):
                break
            value = yield from self._skip_white()
            try:
                if value != '"' or (yield from self._read_text()) is None:
                    break
            except _TooLong:
                break
            self._send(Markup)
        self._rewind(0)

    def _read_key(self) -> Steps[str | None]:
        """Receives a key and the colon after it. Returns None if it is none of a call."""
        quote = yield from self._skip_white()
        if quote != '"':
            return None
        text = ""
        while (piece := (yield None)) != '"':
            text += piece
            if not piece or not any(key.startswith(text) for key in _KEYS):
                return None
        colon = yield from self._skip_white()
        return text if colon == ":" and text in _KEYS else None

    def _read_text(self) -> Steps[str | None]:
        """Receives a string after its first quote. Returns its value; None if it is not JSON."""
        begin = self._num_held - 1
        if not (yield from self._read_string(self._check_held)):
            return None
        try:
            text = json.loads(self._held(begin), strict=False)
            text.encode()
        except ValueError:
            return None
        return str(text)

    def _check_held(self) -> None:
        """Raises _TooLong. The bound does not depend on how the text was divided, because it counts the head only."""
        if self._num_held > MAX_HELD:
            raise _TooLong

    def _skip_separators(self) -> Steps[None]:
        """Holds what may stand between two calls, for the case that another call follows."""
        while (piece := (yield None)) in self.separators and self._num_held <= MAX_HELD:
            pass
        if piece:
            self._rewind(self._num_held - 1)
