"""Thoughts at the beginning of an answer: `<think>…</think>`, as reasoning models write them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from gateway.tools.events import Content, Event, Markup, Reasoning
from gateway.tools.reader import END, Reader, Steps

_REST = re.compile(r"(?s).+")


@dataclass(frozen=True, slots=True)
class ThoughtTags:
    """The texts around a thought."""

    open: str
    close: str

    def is_open(self, text: str) -> bool:
        """Returns whether a text ends within a thought."""
        return text.rfind(self.open) > text.rfind(self.close)


THINK = ThoughtTags("<think>", "</think>")
MISTRAL = ThoughtTags("[THINK]", "[/THINK]")


def tags_of(chat_template: str) -> ThoughtTags | None:
    """Returns the tags that a template shows to the model; None if it shows none."""
    if THINK.open in chat_template or THINK.close in chat_template:
        return THINK
    return MISTRAL if MISTRAL.open in chat_template else None


class ThoughtReader(Reader):
    """Reads a thought that an answer begins with. Tags anywhere else are content.

    rest       reads the text after the thought; None: it is content
    is_within  the prompt has the opening tag, so the answer begins within the thought

    White space beside the tags is markup. A thought without its end is all of the answer.
    """

    def __init__(self, tags: ThoughtTags, rest: Reader | None, *, is_within: bool = False) -> None:
        self._tags = tags
        self._rest = rest
        self._is_within = is_within
        self._plain = re.compile(rf"[^{re.escape(tags.close[0])} \t\n\r]+")
        super().__init__()

    def feed(self, text: str) -> list[Event]:
        return list(self._read_rest(super().feed(text)))

    def end(self) -> list[Event]:
        events = list(self._read_rest(super().end()))
        return events if self._rest is None else events + self._rest.end()

    def _read_rest(self, events: list[Event]) -> Iterator[Event]:
        for event in events:
            if self._rest is not None and isinstance(event, Content):
                yield from self._rest.feed(event.text)
            else:
                yield event

    def _read(self) -> Steps[None]:
        piece = yield from self._skip_white()
        is_opened = piece == self._tags.open[0] and (yield from self._rest_of((self._tags.open,), piece))
        if is_opened:
            yield from self._send_markup()
        else:
            self._rewind(0)
        if is_opened or self._is_within:
            yield from self._read_thought()
        while (yield _REST) != END:
            self._send(Content)

    def _read_thought(self) -> Steps[None]:
        yield from self._send_markup()
        if (yield from self._find((self._tags.close,), self._plain, Reasoning)):
            yield from self._send_markup()

    def _send_markup(self) -> Steps[None]:
        """Sends the held text as markup, with the white space after it."""
        if (yield from self._skip_white()) != END:
            self._rewind(self._num_held - 1)
        self._send(Markup)
