"""Says why a schema is refused, why a valid instance is not accepted, and why an invalid one is."""

import re
from typing import Any

from bench.schemas.following import Followed

OTHER_ORDER = "its properties are in another order than in the schema"
"""The reason for an instance that is accepted once its properties are in the schema's order."""

_UNKNOWN_KEYS = re.compile(r"Unimplemented keys: \[(.*?)\]")
_UNKNOWN_FORMAT = re.compile(r"Unknown format: (\S+)")
_NO_TEXT_OF_THE_GRAMMAR = "Parser Error: token"
"""Begins the error of llguidance for a token that may not come next. Other errors are about limits."""
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|/.*/|https?://\S+|#/\S*")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


def refused_keywords(problem: str) -> list[str]:
    """Returns the keywords of JSON Schema that make a schema refused; empty if it is for another reason."""
    if found := _UNKNOWN_KEYS.search(problem):
        return re.findall(r'"([^"]+)"', found[1])
    if found := _UNKNOWN_FORMAT.search(problem):
        return [f"format: {found[1]}"]
    return ["oneOf"] if problem.startswith("oneOf") else []


def refusal(problem: str) -> str:
    """Returns the kind of a problem, without what it quotes from a schema."""
    keywords = refused_keywords(problem)
    if keywords:
        names = sorted({each.partition(":")[0] for each in keywords})
        return f"keyword: {', '.join(names)}"
    line = problem.strip().partition("\n")[0]
    if "regex parse error" in line or "regex" in line:
        return "regex: not supported, or not a regular expression"
    return _QUOTED.sub("…", line)[:100]


def has_reached_limit(outcome: Followed) -> bool:
    """Returns whether a limit of the matcher ended a text. Copies share some limits, so they are of no use then."""
    return bool(outcome.error) and not outcome.error.startswith(_NO_TEXT_OF_THE_GRAMMAR)


def why_not_accepted(outcome: Followed) -> str:
    """Returns where a valid text is refused: at a limit, in a number, in white space, in a string or between values."""
    if has_reached_limit(outcome):
        return "a limit of the matcher"
    if (
        re.search(r"[-+.\w]$", outcome.before)
        and re.match(r"[-+.eE\d]", outcome.after)
        and not _is_open(outcome.before)
    ):
        return "the form of a number"
    if outcome.after[:1].isspace() and outcome.before[-1:].isspace():
        return "white space"
    if _is_open(outcome.before):
        return "a name: the order or the names of the properties" if _is_name(outcome.before) else "a text"
    return "between values: their order, number or type"


def _is_open(text: str) -> bool:
    """Returns whether a text of JSON ends inside a string."""
    return '"' in _STRING.sub("", text)


def _is_name(text: str) -> bool:
    """Returns whether the string that is open at the end is the name of a property."""
    rest = _STRING.sub('""', text)
    rest = rest[: rest.rindex('"')].rstrip()
    depth = 0
    for character in reversed(rest):
        depth += (character in "]}") - (character in "[{")
        if depth < 0:
            return character == "{" and not rest.endswith(":")
    return False


def violated_keyword(schema: Any, value: Any) -> str:
    """Returns the keyword that makes an instance invalid, by the package jsonschema, which ignores unknown formats."""
    from jsonschema import exceptions, validators

    validator = validators.validator_for(schema)
    errors = validator(schema, format_checker=validator.FORMAT_CHECKER).iter_errors(value)
    best = exceptions.best_match(errors)
    return "none that jsonschema knows" if best is None else str(best.validator)
