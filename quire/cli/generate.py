"""`quire generate`: one request, streamed to the terminal."""

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TextIO

from quire import tries
from quire.events import Delta, Event, Finished, PromptLogprobs, Started, TokenLogprob, TokenLogprobs
from quire.log_writer import put_line


@contextmanager
def breaks_noted(notes: TextIO) -> Iterator[None]:
    """Writes a line when the stream breaks off, and one when it continues."""
    handler = logging.StreamHandler(notes)
    handler.setFormatter(logging.Formatter("quire: %(message)s"))
    tries.log.addHandler(handler)
    tries.log.setLevel(logging.INFO)
    try:
        yield
    finally:
        tries.log.removeHandler(handler)
        tries.log.setLevel(logging.NOTSET)


def write_json(events: Iterable[Event], out: TextIO) -> None:
    """Writes each event as a line of JSON: its fields, and its kind as `event`. Bytes become a list of numbers."""
    for event in events:
        kind = type(event).__name__.lower()
        line = json.dumps({"event": kind} | asdict(event), ensure_ascii=False, default=list)
        if "Infinity" in line:  # of an impossible token or beam; JSON has no such number
            line = json.dumps(json.loads(line, parse_constant=lambda name: None), ensure_ascii=False)
        out.write(line + "\n")
        out.flush()


def write_text(events: Iterable[Event], out: TextIO, notes: TextIO | None = None, *, are_beams: bool = False) -> None:
    """Writes the text as it arrives, then log-probabilities as tables.

    The first sequence is streamed; the others follow when it has ended. Beams are written when the search is over, each
    below a line with its score.

    notes  receives the number of tokens and the reason of each end; None: not written
    """
    texts: dict[int, list[str]] = {}
    logprobs: dict[int, list[TokenLogprobs]] = {}
    prompt: list[TokenLogprobs] = []
    finished: dict[int, Finished] = {}
    for event in events:
        match event:
            case Started():
                put_line(notes, f"[{event.prompt_tokens} prompt tokens, {event.cached_tokens} of them cached]")
            case PromptLogprobs():
                prompt.extend(event.tokens)
            case Delta(index=index):
                texts.setdefault(index, []).append(event.text)
                logprobs.setdefault(index, []).extend(event.logprobs)
                if index == 0 and not are_beams:
                    out.write(event.text)
                    out.flush()
            case Finished():
                finished[event.index] = event
    if not are_beams:
        out.write("\n")
    for index in sorted(finished.keys() | texts.keys()):
        if index or are_beams:
            score = finished[index].score if index in finished else None
            heading = f"--- {index} ---" if score is None else f"--- {index}, score {score:.4f} ---"
            out.write(f"\n{heading}\n{''.join(texts.get(index, ()))}\n")
    if prompt:
        out.write(f"\n{logprob_table('prompt', prompt, first_position=1)}")
    for index in sorted(logprobs):
        if logprobs[index]:
            out.write(f"\n{logprob_table(f'sequence {index}', logprobs[index])}")
    out.flush()
    for index in sorted(finished):
        put_line(notes, f"[{index}: {finished[index].reason}, {finished[index].usage.completion_tokens} tokens]")


def logprob_table(title: str, logprobs: Sequence[TokenLogprobs], first_position: int = 0) -> str:
    """Returns a line for each token: position, id, log-probability and rank, then the most probable tokens."""
    lines = [title, f"{'':>6}{'token':>8}{'logprob':>10}{'rank':>7}" + ("  most probable" if logprobs[0].top else "")]
    for position, entry in enumerate(logprobs, start=first_position):
        top = "".join(f"  {each.token_id}{_shown(each)} {each.logprob:.3f}" for each in entry.top)
        chosen = entry.chosen
        line = f"{position:>6}{chosen.token_id:>8}{chosen.logprob:>10.4f}{chosen.rank:>7}{_shown(chosen)}{top}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def _shown(token: TokenLogprob) -> str:
    """Returns the bytes of a token, if they were requested."""
    return "" if token.token_bytes is None else f" {token.token_bytes!r}"
