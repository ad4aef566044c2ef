"""Checks the grammar of a request (`quire.v1.StructuredOutput`), as far as that is possible without compiling it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from scheduler.text.grammars import GrammarDefinition

if TYPE_CHECKING:
    from scheduler.requests.limits import ModelBounds, RequestLimits
    from scheduler.requests.request_fields import RequestFields

GROUP = "structured_output"
"""The path of the field itself, which is present even if a server does not know the kind of its grammar."""

CHOICE = f"{GROUP}.choice.texts"

KINDS = {"json_schema": f"{GROUP}.json_schema", "json_object": f"{GROUP}.json_object", "regex": f"{GROUP}.regex",
         "choice": CHOICE, "lark": f"{GROUP}.lark"}  # fmt: skip
"""The path of each kind of grammar."""

NO_GRAMMARS = "the executor cannot follow grammars"

ANY_OBJECT = '{"type": "object"}'


def read_structured_output(
    fields: RequestFields, limits: RequestLimits, bounds: ModelBounds, *, has_eos: bool
) -> GrammarDefinition | None:
    """Returns the grammar of a request; None if it has none, or after a violation.

    has_eos  the model has an EOS token that can end the output
    """
    given = [kind for kind, path in KINDS.items() if path in fields]
    if GROUP not in fields and not given:
        return None
    if not bounds.has_grammars:
        fields.add_violation(GROUP, NO_GRAMMARS)
    elif not has_eos:
        fields.add_violation(GROUP, "this model has no EOS token, with which the output could end")
    _check_conflicts(fields)
    if len(given) != 1:
        problem = f"must be one of {', '.join(KINDS)}, not {' and '.join(given) or 'none'}"
        fields.add_violation(GROUP, problem)
        return None
    kind = given[0]
    if kind == "choice":
        return GrammarDefinition("choice", json.dumps(_choices(fields, limits), ensure_ascii=False))
    if kind == "json_object":
        if fields.flag(KINDS[kind]) is False:
            fields.add_violation(KINDS[kind], "must be true, or absent")
        return GrammarDefinition("json_schema", ANY_OBJECT)
    text = fields.text(KINDS[kind], limits.max_grammar_bytes)
    if not text:
        fields.add_violation(KINDS[kind], "must not be empty")
    return GrammarDefinition(kind, text)


def _check_conflicts(fields: RequestFields) -> None:
    """Adds violations for fields with which the tokens that a grammar allows could all be forbidden."""
    reason = "with structured_output"
    if fields.get("stopping.ignore_eos") is True:
        fields.add_violation("stopping.ignore_eos", f"must be false {reason}, whose output ends with EOS")
    if fields.get("stopping.min_tokens") not in (None, 0):
        fields.add_violation("stopping.min_tokens", f"must be 0 {reason}, whose output ends when it is complete")
    if fields.get("sampling.allowed_token_ids"):
        fields.add_violation("sampling.allowed_token_ids", f"must be empty {reason}, which allows tokens itself")


def _choices(fields: RequestFields, limits: RequestLimits) -> list[str]:
    values = fields.items(CHOICE, limits.max_num_choices)
    if not values:
        fields.add_violation(CHOICE, f"must have 1 to {limits.max_num_choices} texts")
    num_left, texts = limits.max_grammar_bytes, []
    for i, value in enumerate(values):
        texts.append(fields.check_text(f"{CHOICE}[{i}]", value, limits.max_grammar_bytes))
        num_left -= len(texts[-1].encode())
        if num_left < 0:
            fields.add_violation(CHOICE, f"must have at most {limits.max_grammar_bytes} bytes together")
            return []
    return texts
