"""`quire generate`: one request, streamed to the terminal."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import TextIO

from quire.events import Delta, Event, Finished, Started


def write_json(events: Iterable[Event], out: TextIO) -> None:
    """One JSON object a line for each event, as it comes: its fields, and its kind in `event`."""
    for event in events:
        kind = type(event).__name__.lower()
        out.write(json.dumps({"event": kind} | asdict(event), ensure_ascii=False) + "\n")
        out.flush()


def write_text(events: Iterable[Event], out: TextIO, notes: TextIO | None = None) -> None:
    """The text as it comes. Of several sequences all but the first wait, and follow it one after the other.

    notes  where to say what each sequence cost and why it ended; None: nowhere
    """
    held: dict[int, list[str]] = {}
    finished: list[Finished] = []
    for event in events:
        match event:
            case Started() if notes is not None:
                notes.write(f"[{event.prompt_tokens} prompt tokens, {event.cached_tokens} of them cached]\n")
            case Delta(index=0):
                out.write(event.text)
                out.flush()
            case Delta(index=index):
                held.setdefault(index, []).append(event.text)
            case Finished():
                finished.append(event)
                held.setdefault(event.index, [])
    out.write("\n")
    for index in sorted(held.keys() - {0}):
        out.write(f"\n--- {index} ---\n{''.join(held[index])}\n")
    out.flush()
    if notes is not None:
        for end in sorted(finished, key=lambda end: end.index):
            notes.write(f"[{end.index}: {end.reason}, {end.usage.completion_tokens} tokens]\n")
