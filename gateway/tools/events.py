"""The events into which a reader divides the text of a model.

In order, the texts of all events but `CallStarted` are the text of the model: no character is lost or repeated.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text in which the model has thought."""

    text: str


@dataclass(frozen=True, slots=True)
class Markup:
    """Text that only structures the output: markers, the names of tools, and white space beside calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call begins. Calls are numbered from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A part of a call's arguments, as the model wrote it.

    is_written  False: the model wrote none, and this text, `{}`, says so
    """

    index: int
    text: str
    is_written: bool = True


Event: TypeAlias = Content | Reasoning | Markup | CallStarted | Arguments


def merged(events: Iterable[Event]) -> list[Event]:
    """Returns the events with neighbours of one kind as one event."""
    found: list[Event] = []
    for _, group in groupby(events, key=_kind):
        first, *others = group
        if others and not isinstance(first, CallStarted):
            text = "".join([each.text for each in (first, *others) if not isinstance(each, CallStarted)])
            first = replace(first, text=text)
        found.append(first)
    return found


def _kind(event: Event) -> tuple[object, ...]:
    """Returns what neighbours must have in common to become one event; starts of calls never have."""
    if isinstance(event, Arguments):
        return Arguments, event.index, event.is_written
    return (CallStarted, event.index) if isinstance(event, CallStarted) else (type(event),)
