"""Schemas are restated in keywords that llguidance follows. Up to draft 7, a reference stands alone."""

import json
from typing import Any

import pytest

from quire.json_schemas import restated

DRAFT_4, DRAFT_7 = "http://json-schema.org/draft-04/schema#", "http://json-schema.org/draft-07/schema"
DRAFT_2020 = "https://json-schema.org/draft/2020-12/schema"
BESIDE = {"$ref": "#/x", "type": "string", "description": "d"}
ALONE = {"$ref": "#/x"}


@pytest.mark.parametrize("draft", [DRAFT_4, DRAFT_7])
@pytest.mark.parametrize(
    ("given", "alone"),
    [
        ({"items": BESIDE}, {"items": ALONE}),
        ({"items": [BESIDE, {"type": "null"}]}, {"items": [ALONE, {"type": "null"}]}),
        ({"anyOf": [{"not": BESIDE}]}, {"anyOf": [{"not": ALONE}]}),
        ({"properties": {"a": BESIDE}}, {"properties": {"a": ALONE}}),
        ({"x": {"type": "object", "y": BESIDE}}, {"x": {"type": "object", "y": ALONE}}),
        ({"additionalProperties": False}, {"additionalProperties": False}),
    ],
)
def test_what_stands_beside_a_reference_is_left_out(draft: str, given: dict[str, Any], alone: dict[str, Any]) -> None:
    assert restated({"$schema": draft} | given) == {"$schema": draft} | alone


def test_properties_may_have_the_names_of_keywords() -> None:
    schema = {
        "$schema": DRAFT_7,
        "properties": {"$ref": {"type": "string"}, "enum": BESIDE, "type": {"const": 1}},
        "required": ["$ref", "type"],
    }
    assert restated(schema) == schema | {"properties": schema["properties"] | {"enum": ALONE}}  # type: ignore[operator]


@pytest.mark.parametrize("keyword", ["enum", "const", "default", "examples"])
def test_data_stay_as_they_are(keyword: str) -> None:
    schema = {"$schema": DRAFT_7, keyword: [BESIDE]}
    assert restated(schema) == schema


def test_definitions_stay_beside_a_reference() -> None:
    schema = {"$schema": DRAFT_7, "$ref": "#/definitions/a", "type": "object", "definitions": {"a": BESIDE}}
    assert restated(schema) == {"$schema": DRAFT_7, "$ref": "#/definitions/a", "definitions": {"a": ALONE}}


@pytest.mark.parametrize("draft", [None, DRAFT_2020, 7, "draft-07"])
def test_schemas_of_other_drafts_stay_as_they_are(draft: object) -> None:
    schema = {"$schema": draft, "items": BESIDE}
    assert restated(schema) == schema


def test_a_schema_of_very_many_levels_stays_as_it_is() -> None:
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"items": schema}
    schema["$schema"] = DRAFT_7
    assert restated(schema) is schema


def test_given_schemas_do_not_change() -> None:
    schema = {"$schema": DRAFT_7, "properties": {"a": BESIDE}}
    before = json.dumps(schema)
    restated(schema)
    assert json.dumps(schema) == before


@pytest.mark.parametrize("names", [{"type": "string"}, {}, True, {"format": "path"}])
def test_what_restricts_nothing_is_left_out(names: Any) -> None:
    """Zod writes it for each record, and Pydantic for paths, secrets and bytes."""
    schema = {
        "properties": {"format": {"type": "string", "format": "password"}, "propertyNames": {"format": "uuid"}},
        "propertyNames": names,
        "const": {"format": "password"},
    }
    left = {"properties": {"format": {"type": "string"}, "propertyNames": {"format": "uuid"}}, "const": schema["const"]}
    assert restated(schema) == left
    for stays in ({"propertyNames": {"pattern": "^a"}}, {"format": "iri"}, {"format": 5}, {"propertyNames": False}):
        assert restated(stays) == stays


def test_alternatives_require_the_property_that_tells_them_apart() -> None:
    """With a default, as Pydantic's tags often have, it is not among the required ones."""
    cat, dog = {"$ref": "#/$defs/Cat"}, {"properties": {"kind": {"const": "dog"}}, "required": ["kind"]}
    tag = {"propertyName": "kind", "mapping": {"cat": "#/$defs/Cat"}}
    schema = {"items": {"discriminator": tag, "oneOf": [cat, dog]}}
    assert restated(schema) == {"items": {"discriminator": tag, "oneOf": [cat | {"required": ["kind"]}, dog]}}
    old = {"$schema": DRAFT_7, "discriminator": tag, "oneOf": [cat | {"title": "Cat"}, dog]}
    assert restated(old)["oneOf"] == [cat | {"required": ["kind"]}, dog]
    for other in ({"oneOf": [cat, dog]}, {"discriminator": "kind", "oneOf": [cat]}, {"discriminator": tag, "oneOf": 5}):
        assert restated(other) == other
    assert restated({"discriminator": tag, "oneOf": [True, cat]})["oneOf"] == [True, cat]


@pytest.mark.parametrize("pattern", [r"^(?!\.)a$", r"(?<=a)b", r"\bfox\b", r"(a)\1"])
def test_patterns_that_look_around_are_left_out_if_need_be(pattern: str) -> None:
    schema = {"properties": {"a": {"type": "string", "pattern": pattern}}}
    assert restated(schema) == schema
    assert restated(schema, is_lenient=True) == {"properties": {"a": {"type": "string"}}}


@pytest.mark.parametrize("pattern", [r"^(?:a|b)$", r"[(?=]", r"\\b", r"\(?=?", r"[\b]", r"(?<n>a)"])
def test_other_patterns_stay(pattern: str) -> None:
    assert restated({"pattern": pattern}, is_lenient=True) == {"pattern": pattern}
