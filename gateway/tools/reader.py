"""The base of all readers: they divide a text that arrives in parts into events, and hold back what may become a call.

A reader is a generator that receives the text piece by piece. The text that it has received and not sent is *held*:

    … sent ├── held ──┤ not received
         _start      _pos

`_send` turns held text into an event, and `_rewind` makes a part of it arrive again. So each character is in exactly
one event. Held text is short: `MAX_HELD` bounds it, and with it the work for each character.

The rule for broken calls: a call has begun when its tool is named and its arguments have begun, in the form of the
format. Text before that point that does not keep to the form is content. From that point to the end of the arguments,
everything is arguments, valid JSON or not.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator
from typing import TypeAlias, TypeVar

from gateway.tools.events import Arguments, CallStarted, Content, Event, Markup, merged

T = TypeVar("T")
Steps: TypeAlias = Generator[re.Pattern[str] | None, str, T]
"""The steps of a reader. Each yields a pattern, and receives a run of characters that matches it, otherwise one
character; at the end of the text, the empty string, as often as it asks."""

MAX_HELD = 4096
WHITE = frozenset(" \t\n\r")
END = ""

_OUTSIDE_STRINGS = re.compile(r'[^{}"]+')
_IN_STRINGS = re.compile(r'[^"\\]+')


class Reader(ABC):
    """Reads one output. `feed` takes any part of its text, and `end` must be called once, when it is complete.

    separators  characters that may stand between calls, and are content elsewhere
    """

    separators: frozenset[str] = WHITE

    def __init__(self) -> None:
        self._text = ""
        self._start = 0
        self._pos = 0
        self._events: list[Event] = []
        self._num_calls = 0
        self._is_after_call = False
        self._steps = self._read()
        self._run = next(self._steps)

    def feed(self, text: str) -> list[Event]:
        """Returns the events that are certain, whatever text follows."""
        self._text = self._text[self._start :] + text
        self._pos -= self._start
        self._start = 0
        self._step()
        return self._taken()

    def end(self) -> list[Event]:
        """Returns the rest of the events."""
        while True:
            self._step()
            try:
                self._run = self._steps.send(END)
            except StopIteration:
                break
        self._send(Content)
        return self._taken()

    @abstractmethod
    def _read(self) -> Steps[None]:
        """Reads the whole text, from its first character to its end."""

    def _step(self) -> None:
        text = self._text
        while self._pos < len(text):
            run = None if self._run is None else self._run.match(text, self._pos)
            begin, self._pos = self._pos, self._pos + 1 if run is None else run.end()
            self._run = self._steps.send(text[begin : self._pos])

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return merged(events)

    # --- held text ---

    @property
    def _num_held(self) -> int:
        return self._pos - self._start

    def _held(self, begin: int = 0) -> str:
        return self._text[self._start + begin : self._pos]

    def _rewind(self, num_held: int) -> None:
        """Lets the held text beyond so many characters arrive again."""
        self._pos = self._start + num_held

    def _send(self, new: Callable[[str], Event], num_held: int | None = None) -> None:
        """Sends the first `num_held` held characters, or all of them."""
        end = self._pos if num_held is None else self._start + num_held
        if end > self._start:
            event = new(self._text[self._start : end])
            self._start = end
            self._is_after_call = self._is_after_call and not isinstance(event, Content)
            self._events.append(event)

    # --- steps that formats share ---

    def _find(
        self, markers: Collection[str], plain: re.Pattern[str], kind: Callable[[str], Event] = Content
    ) -> Steps[str]:
        """Sends text up to a marker, which stays held with the white space before it. Returns the marker; at the end of
        the text, the empty string.

        plain  matches runs of characters that are neither white space nor the first one of a marker
        kind   makes the event of the text
        """
        firsts = {marker[0] for marker in markers}
        while True:
            piece = yield plain
            if piece == END:
                is_between = self._is_after_call and self.separators.issuperset(self._held())
                self._send(Markup if is_between else kind)
                return END
            if piece in firsts:
                num_held = self._num_held
                if marker := (yield from self._rest_of(markers, piece)):
                    return marker
                self._rewind(num_held)
                self._send(kind)
            elif piece not in WHITE or self._num_held > MAX_HELD:
                self._send(kind)

    def _rest_of(self, texts: Collection[str], begun: str) -> Steps[str | None]:
        """Receives the rest of one of the texts. Returns the text; None if something else has arrived."""
        while begun not in texts:
            begun += (piece := (yield None))
            if piece == END or not any(text.startswith(begun) for text in texts):
                return None
        return begun

    def _skip_white(self) -> Steps[str]:
        """Returns the next character that is no white space."""
        while (piece := (yield None)) in WHITE and self._num_held <= MAX_HELD:
            pass
        return piece

    def _start_call(self, name: str) -> int:
        """Sends the event of a new call. Returns its index."""
        index = self._num_calls
        self._events.append(CallStarted(index, name))
        self._num_calls += 1
        self._is_after_call = True
        return index

    def _start_empty_call(self, name: str) -> None:
        """Sends the events of a call without arguments, for which all held text is markup."""
        self._send(Markup)
        index = self._start_call(name)
        self._events.append(Arguments(index, "{}", is_written=False))

    def _read_arguments(self, name: str) -> Steps[None]:
        """Begins a call with its arguments, and sends these. The brace that opens them is the last held character."""
        self._send(Markup, self._num_held - 1)
        index = self._start_call(name)

        def arguments(text: str) -> Arguments:
            return Arguments(index, text)

        yield from self._read_object(lambda: self._send(arguments))

    def _read_object(self, send: Callable[[], None]) -> Steps[None]:
        """Receives an object after its first brace, and calls `send` after each piece. Braces in strings do not count;
        the text need not be JSON otherwise."""
        depth = 1
        send()
        while depth:
            piece = yield _OUTSIDE_STRINGS
            if piece == END:
                return
            depth += (piece == "{") - (piece == "}")
            send()
            if piece == '"':
                yield from self._read_string(send)

    def _read_string(self, send: Callable[[], None]) -> Steps[bool]:
        """Receives a string after its first quote. Returns whether it has ended."""
        while (piece := (yield _IN_STRINGS)) not in ('"', END):
            send()
            if piece == "\\":
                yield None
                send()
        send()
        return piece != END
