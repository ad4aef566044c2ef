"""Tokens as letters, which makes prompts readable: a is 0, b is 1, … z is 25."""

from collections.abc import Iterable, Sequence

from scheduler.core import DEFAULT_TENANT, BeamParams, Request, SequenceParams
from scheduler.core import Sequence as CoreSequence

VOCAB_SIZE = 26


def to_ids(text: str) -> tuple[int, ...]:
    return tuple(ord(letter) - ord("a") for letter in text)


def to_text(token_ids: Iterable[int]) -> str:
    return "".join(chr(ord("a") + token_id) for token_id in token_ids)


def make_request(
    request_id: int,
    prompt: str = "abc",
    max_tokens: int = 4,
    *,
    seeds: Sequence[int] = (0,),
    eos: str = "",
    priority: int = 0,
    salt: bytes = b"",
    deadline_s: float | None = None,
    beam: BeamParams | None = None,
    is_open_ended: bool = False,
    tenant: str = DEFAULT_TENANT,
) -> Request:
    """Returns a request. `max_tokens` bounds the output; `eos` has the letters that end a sequence."""
    return Request(
        request_id,
        to_ids(prompt),
        SequenceParams(max_total_tokens=len(prompt) + max_tokens, eos_token_ids=to_ids(eos)),
        seeds=tuple(seeds),
        priority=priority,
        cache_salt=salt,
        deadline_s=deadline_s,
        beam=beam,
        is_open_ended=is_open_ended,
        tenant=tenant,
    )


def make_sequence(prompt: str, *, salt: bytes = b"") -> CoreSequence:
    """Returns a new sequence, in the state of a waiting one."""
    return CoreSequence(make_request(1, prompt, 100, salt=salt), index=0, arrival=1)
