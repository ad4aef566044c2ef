"""Requests for the validator, with a model of 1,000 tokens that runs eight sequences of 64 tokens."""

from typing import Any, NoReturn

import pytest

from scheduler.core import InvalidRequest, Request
from scheduler.requests.generation_defaults import GenerationDefaults
from scheduler.requests.limits import ModelBounds, RequestLimits
from scheduler.requests.request_fields import RequestFields
from scheduler.requests.validation import RequestChecker

V = 1000
LIMITS = RequestLimits()
BOUNDS = ModelBounds(vocab_size=V, max_num_seqs=8, max_tokens_per_sequence=64, has_chat_template=True)
DEFAULTS = GenerationDefaults(eos_token_ids=(2,))

PATHS = {"token_ids": "token_ids.ids", "chat": "chat.messages"}


def request(
    sampling: dict[str, Any] | None = None,
    stopping: dict[str, Any] | None = None,
    output: dict[str, Any] | None = None,
    **fields: Any,
) -> RequestFields:
    """Returns the fields of a request, which has token ids as its prompt unless another prompt is given."""
    if not fields.keys() & {"text", "token_ids", "chat"}:
        fields["token_ids"] = [1, 2, 3]
    values = {PATHS.get(name, name): value for name, value in fields.items()}
    for group, group_values in (("sampling", sampling), ("stopping", stopping), ("output", output)):
        values |= {f"{group}.{name}": value for name, value in (group_values or {}).items()}
    return RequestFields(values)


def check(
    fields: RequestFields,
    bounds: ModelBounds = BOUNDS,
    limits: RequestLimits = LIMITS,
    defaults: GenerationDefaults = DEFAULTS,
) -> RequestChecker:
    return RequestChecker(fields, limits, bounds, defaults, drawn_seed=7)


def violations(fields: RequestFields, bounds: ModelBounds = BOUNDS, limits: RequestLimits = LIMITS) -> dict[str, str]:
    """Checks that a request is invalid, and returns its violations."""
    with pytest.raises(InvalidRequest) as caught:
        check(fields, bounds, limits)
    assert all(problem for problem in caught.value.violations.values())
    return caught.value.violations


def admit(fields: RequestFields, defaults: GenerationDefaults = DEFAULTS, num_prompt: int | None = None) -> Request:
    """Returns the core's request; `num_prompt` is the number of tokens of a prompt that is a text."""
    checker = check(fields, defaults=defaults)
    prompt = checker.token_ids if num_prompt is None else [5] * num_prompt
    assert prompt is not None
    return checker.complete(prompt, BOUNDS, request_id=1, deadline_s=None)


class Unread(list[Any]):
    """A list whose length may be read, but not its items."""

    def _refuse(self, *_: object) -> NoReturn:
        raise AssertionError("was looked into")

    __iter__ = __getitem__ = __contains__ = __repr__ = __str__ = _refuse
