"""Prepares JSON schemas for llguidance, which follows the rules of draft 2020-12 in every schema.

Up to draft 7, an object with `$ref` is only a reference: what stands beside it is ignored (JSON Schema Core, draft 7,
section 8.3). Since draft 2019-09 both hold, and llguidance accepts only what satisfies both.
"""

import re
from typing import Any

_ONLY_REFERENCES = re.compile(r"https?://json-schema\.org/draft-0[3-7]/")

_MAPS = {"properties", "patternProperties", "definitions", "$defs", "dependencies"}
"""Keywords whose values have a schema under each name."""

_DATA = {"enum", "const", "default", "examples", "example"}
"""Keywords whose values are no schemas."""

_VALUES = {"enum", "const"}
"""Keywords whose values the text has to have."""

_CONTROL = r"[\x00-\x07\x0b\x0e-\x1f\x7f]"
"""Characters that JSON writes only as \\u and four digits, and DEL, which llguidance would write so too."""

_IN_TEXT = re.compile(f"(?P<found>{_CONTROL})")

_CODE = "(?:0[0-7bBeEfF]|1[0-9a-fA-F]|7[fF])"
_IN_PATTERN = re.compile(rf"(?s)\[(?:\\.|[^\\\]])*\]|(?P<found>{_CONTROL}|\\(?:[av]|x{_CODE}|u00{_CODE}))|\\.")
"""Skips classes of characters: those that cannot be written only make them smaller."""

_BESIDE_REFERENCES = {"$ref", "$schema", "$id", "id", "definitions", "$defs"}
"""Keywords that stay beside `$ref`, because they restrict nothing, and other references may lead into them."""


def by_its_draft(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a schema that means under the rules of draft 2020-12 what the schema means under those of its `$schema`.

    A schema of hundreds of levels is returned as it is: llguidance refuses it.
    """
    named = schema.get("$schema")
    if not (isinstance(named, str) and _ONLY_REFERENCES.match(named)):
        return schema
    try:
        restated: dict[str, Any] = _restated(schema)
    except RecursionError:
        return schema
    return restated


def _restated(schema: Any) -> Any:
    """Returns a schema, or a list of them, without what stands beside references."""
    if isinstance(schema, list):
        return [_restated(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    is_reference = isinstance(schema.get("$ref"), str)
    restated = {}
    for keyword, value in schema.items():
        if is_reference and keyword not in _BESIDE_REFERENCES:
            continue
        if keyword in _MAPS and isinstance(value, dict):
            value = {name: _restated(each) for name, each in value.items()}
        elif keyword not in _DATA:  # references may lead into unknown keywords, too
            value = _restated(value)
        restated[keyword] = value
    return restated


def has_unwritable_text(schema: Any) -> bool:
    """Returns whether a value or a pattern of a schema needs a control character that no string of the output can have.

    llguidance would leave it out of the string, which then satisfies the schema no more. Names of properties are
    written as they are. Raises RecursionError for a schema of hundreds of levels.
    """
    if isinstance(schema, list):
        return any(map(has_unwritable_text, schema))
    if not isinstance(schema, dict):
        return False
    for keyword, value in schema.items():
        if keyword in _VALUES and _finds(_IN_TEXT, value):
            return True
        patterns = list(value) if keyword == "patternProperties" and isinstance(value, dict) else value
        if keyword in ("pattern", "patternProperties") and _finds(_IN_PATTERN, patterns):
            return True
        if keyword in _MAPS and isinstance(value, dict):
            value = list(value.values())
        if keyword not in _DATA and has_unwritable_text(value):
            return True
    return False


def _finds(characters: re.Pattern[str], value: Any) -> bool:
    """Returns whether a string within a value has one of the characters."""
    if isinstance(value, str):
        return any(match["found"] for match in characters.finditer(value))
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return False
    return any(_finds(characters, each) for each in value)
