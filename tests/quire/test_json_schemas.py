"""Up to draft 7, a reference stands alone; since then, what is beside it holds, too."""

import json
from typing import Any

import pytest

from quire.json_schemas import by_its_draft

DRAFT_4, DRAFT_7 = "http://json-schema.org/draft-04/schema#", "http://json-schema.org/draft-07/schema"
DRAFT_2020 = "https://json-schema.org/draft/2020-12/schema"
BESIDE = {"$ref": "#/x", "type": "string", "description": "d"}
ALONE = {"$ref": "#/x"}


@pytest.mark.parametrize("draft", [DRAFT_4, DRAFT_7])
@pytest.mark.parametrize(
    ("given", "restated"),
    [
        ({"items": BESIDE}, {"items": ALONE}),
        ({"items": [BESIDE, {"type": "null"}]}, {"items": [ALONE, {"type": "null"}]}),
        ({"anyOf": [{"not": BESIDE}]}, {"anyOf": [{"not": ALONE}]}),
        ({"properties": {"a": BESIDE}}, {"properties": {"a": ALONE}}),
        ({"x": {"type": "object", "y": BESIDE}}, {"x": {"type": "object", "y": ALONE}}),
        ({"additionalProperties": False}, {"additionalProperties": False}),
    ],
)
def test_what_stands_beside_a_reference_is_left_out(
    draft: str, given: dict[str, Any], restated: dict[str, Any]
) -> None:
    assert by_its_draft({"$schema": draft} | given) == {"$schema": draft} | restated


def test_properties_may_have_the_names_of_keywords() -> None:
    schema = {
        "$schema": DRAFT_7,
        "properties": {"$ref": {"type": "string"}, "enum": BESIDE, "type": {"const": 1}},
        "required": ["$ref", "type"],
    }
    assert by_its_draft(schema) == schema | {"properties": schema["properties"] | {"enum": ALONE}}  # type: ignore[operator]


@pytest.mark.parametrize("keyword", ["enum", "const", "default", "examples"])
def test_data_stay_as_they_are(keyword: str) -> None:
    schema = {"$schema": DRAFT_7, keyword: [BESIDE]}
    assert by_its_draft(schema) == schema


def test_definitions_stay_beside_a_reference() -> None:
    schema = {"$schema": DRAFT_7, "$ref": "#/definitions/a", "type": "object", "definitions": {"a": BESIDE}}
    assert by_its_draft(schema) == {"$schema": DRAFT_7, "$ref": "#/definitions/a", "definitions": {"a": ALONE}}


@pytest.mark.parametrize("draft", [None, DRAFT_2020, 7, "draft-07"])
def test_schemas_of_other_drafts_stay_as_they_are(draft: object) -> None:
    schema = {"$schema": draft, "items": BESIDE}
    assert by_its_draft(schema) is schema


def test_a_schema_of_very_many_levels_stays_as_it_is() -> None:
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"items": schema}
    schema["$schema"] = DRAFT_7
    assert by_its_draft(schema) is schema


def test_given_schemas_do_not_change() -> None:
    schema = {"$schema": DRAFT_7, "properties": {"a": BESIDE}}
    before = json.dumps(schema)
    by_its_draft(schema)
    assert json.dumps(schema) == before
