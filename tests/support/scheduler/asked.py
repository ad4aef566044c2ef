"""What is asked for, as the checks see it: a model of a thousand tokens, eight sequences of 64 tokens."""

from typing import Any, NoReturn

import pytest

from scheduler.core import InvalidRequest, Request
from scheduler.requests.generation_defaults import GenerationDefaults
from scheduler.requests.incoming import IncomingRequest, Output, Sampling, Stopping
from scheduler.requests.validation import ModelBounds, RequestLimits, check, complete

V = 1000
LIMITS = RequestLimits()
BOUNDS = ModelBounds(vocab_size=V, max_num_seqs=8, max_tokens_per_sequence=64, has_chat_template=True)
DEFAULTS = GenerationDefaults(eos_token_ids=(2,))


def request(
    sampling: dict[str, Any] | None = None,
    stopping: dict[str, Any] | None = None,
    output: dict[str, Any] | None = None,
    **fields: Any,
) -> IncomingRequest:
    if not fields.keys() & {"text", "token_ids", "chat"}:
        fields["token_ids"] = [1, 2, 3]
    return IncomingRequest(
        sampling=Sampling(**sampling or {}),
        stopping=Stopping(**stopping or {}),
        output=Output(**output or {}),
        **fields,
    )


def violations(
    incoming: IncomingRequest, bounds: ModelBounds = BOUNDS, limits: RequestLimits = LIMITS
) -> dict[str, str]:
    with pytest.raises(InvalidRequest) as caught:
        check(incoming, limits, bounds, DEFAULTS, drawn_seed=7)
    assert all(problem for problem in caught.value.violations.values())
    return caught.value.violations


def admit(incoming: IncomingRequest, defaults: GenerationDefaults = DEFAULTS, num_prompt: int | None = None) -> Request:
    checked = check(incoming, LIMITS, BOUNDS, defaults, drawn_seed=7)
    prompt = checked.token_ids if num_prompt is None else [5] * num_prompt
    assert prompt is not None
    return complete(checked, prompt, BOUNDS, request_id=1, deadline_s=None)


class Unread(list[Any]):
    """A list that nobody may look into: its length has to tell enough."""

    def _refuse(self, *_: object) -> NoReturn:
        raise AssertionError("was looked into")

    __iter__ = __getitem__ = __contains__ = __repr__ = __str__ = _refuse
