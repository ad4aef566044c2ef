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
