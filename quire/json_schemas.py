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

_LOOKAROUND = re.compile(r"(?s)\[(?:\\.|[^\\\]])*\]|(?P<found>\(\?<?[=!]|\\[bBk1-9])|\\.")
"""Finds what a pattern requires around a text, or again, in patterns of ECMAScript."""

_FORMATS = {
    "date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6", "uri",
    "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer", "relative-json-pointer", "regex",
}  # fmt: skip
"""The formats of draft 2020-12."""

_BESIDE_REFERENCES = {"$ref", "$schema", "$id", "id", "definitions", "$defs"}
"""Keywords that stay beside `$ref`, because they restrict nothing, and other references may lead into them."""


def restated(schema: dict[str, Any], *, is_lenient: bool = False) -> dict[str, Any]:
    """Returns a schema that llguidance can follow. It means under the rules of draft 2020-12 what the given one means
    under those of its `$schema`.

    is_lenient  patterns that llguidance cannot follow are left out

    A schema of hundreds of levels is returned as it is: llguidance refuses it.
    """
    named = schema.get("$schema")
    is_old = isinstance(named, str) and _ONLY_REFERENCES.match(named) is not None
    try:
        found: dict[str, Any] = _restated(schema, is_old, is_lenient)
    except RecursionError:
        return schema
    return found


def _restated(schema: Any, is_old: bool, is_lenient: bool) -> Any:
    """Returns a schema, or a list of them. `is_old`: what stands beside references is left out."""
    if isinstance(schema, list):
        return [_restated(each, is_old, is_lenient) for each in schema]
    if not isinstance(schema, dict):
        return schema
    is_reference = is_old and isinstance(schema.get("$ref"), str)
    found = {}
    for keyword, value in schema.items():
        if is_reference and keyword not in _BESIDE_REFERENCES:
            continue
        if is_lenient and keyword == "pattern" and _finds(_LOOKAROUND, value):
            continue
        if keyword in _MAPS and isinstance(value, dict):
            value = {name: _restated(each, is_old, is_lenient) for name, each in value.items()}
        elif keyword not in _DATA:  # references may lead into unknown keywords, too
            value = _restated(value, is_old, is_lenient)
        if not _restricts_nothing(keyword, value):
            found[keyword] = value
    return _with_tags(found)


def _restricts_nothing(keyword: str, value: Any) -> bool:
    """Returns whether any text satisfies a keyword that llguidance would refuse.

    An unknown format is an annotation (JSON Schema Validation, draft 2020-12, section 7.2.3). Names are strings.
    """
    if keyword == "format":
        return isinstance(value, str) and value not in _FORMATS
    return keyword == "propertyNames" and value in (True, {}, {"type": "string"})


def _with_tags(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a schema whose alternatives require the property that tells them apart, which `discriminator` names.

    OpenAPI demands it, and without it llguidance does not see that only one of them can hold.
    """
    options, tag = schema.get("oneOf"), schema.get("discriminator")
    name = tag.get("propertyName") if isinstance(tag, dict) else None
    if not isinstance(name, str) or not isinstance(options, list):
        return schema
    tagged = []
    for option in options:
        required = option.get("required", []) if isinstance(option, dict) else None
        if not isinstance(required, list):
            return schema
        tagged.append(option if name in required else option | {"required": [*required, name]})
    return schema | {"oneOf": tagged}


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
