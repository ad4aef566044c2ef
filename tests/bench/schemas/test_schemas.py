"""The measurement of schemas, on a suite of a few that a person has counted."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.command_line import BenchError
from bench.schemas.command import main
from bench.schemas.following import Followed, Follower, Vocabulary
from bench.schemas.measurement import LAYOUTS
from bench.schemas.reasons import OTHER_ORDER, refusal, refused_keywords, violated_keyword, why_not_accepted
from bench.schemas.suite import read_cases
from quire.model_path import embedded_model
from scheduler.text.checkpoint import Checkpoint

COUNTED = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
CASES: dict[str, tuple[Any, list[tuple[bool, Any]]]] = {
    "a": (COUNTED, [(True, {"n": 5}), (True, {"n": 2.0}), (False, {"n": "x"}), (False, {})]),
    "b": ({"not": {}}, [(True, 5)]),
    "c": ({"enum": ["ü", [[[1]]]]}, [(True, "ü"), (True, [[[1]]]), (False, 5)]),
    # An instance that is called invalid by mistake.
    "d": ({"type": "integer"}, [(False, 7)]),
}


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    directory = tmp_path / "data"
    directory.mkdir()
    for name, (schema, tests) in CASES.items():
        found = {"schema": schema, "tests": [{"valid": is_valid, "data": data} for is_valid, data in tests]}
        (directory / f"{name}.json").write_text(json.dumps(found))
    return directory


def measured(suite: Path, *flags: str) -> dict[str, Any]:
    results = suite.parent / "results.json"
    main([str(suite), "--json", str(results), *flags])
    found: dict[str, Any] = json.loads(results.read_text())
    return found


def test_everything_is_counted(suite: Path) -> None:
    found = measured(suite)
    assert (found["schemas"], found["compiled"], found["refused"]) == (4, 3, 1)
    assert found["refusals"] == {"keyword: not": 1}
    assert found["refused_keywords"] == {"not": 1}
    assert found["valid_instances"] == dict.fromkeys(LAYOUTS, 4)
    assert found["valid_instances_accepted"] == dict.fromkeys(LAYOUTS, 3)
    assert (found["invalid_instances"], found["invalid_instances_accepted"]) == (4, 1)
    (missed,) = found["not_accepted"]
    assert (missed["schema"], missed["instance"], missed["layouts"]) == ("a", 1, list(LAYOUTS))
    assert missed["reason"] == "the form of a number"
    assert missed["before"] + missed["after"] == '{"n": 2.0}'
    (wrong,) = found["wrongly_accepted"]
    assert wrong == {"schema": "d", "instance": 0, "keyword": "none that jsonschema knows"}
    assert found["masks"] > 20
    assert found["mask_us"]["p50"] > 0


def test_instances_in_another_order_are_told_apart(tmp_path: Path) -> None:
    schema = COUNTED | {"properties": {"n": {"type": "integer"}, "m": {"items": COUNTED}}}
    instances = [{"m": [{"n": 1}], "n": 2}, {"m": [], "n": "x"}]
    directory = tmp_path / "data"
    directory.mkdir()
    found = {"schema": schema, "tests": [{"valid": True, "data": each} for each in instances]}
    (directory / "a.json").write_text(json.dumps(found))
    reasons = [each["reason"] for each in measured(directory)["not_accepted"]]
    assert reasons == [OTHER_ORDER, "a name: the order or the names of the properties"]


def test_a_sample_has_every_nth_schema(suite: Path) -> None:
    assert [case.name for case in read_cases(suite, every=2, first=1)] == ["b", "d"]
    assert measured(suite, "--every", "2", "--first", "1")["schemas"] == 2


def test_a_folder_without_schemas_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="no schemas"):
        main([str(tmp_path)])
    (tmp_path / "x.json").write_text('{"tests": []}')
    with pytest.raises(BenchError, match="not a schema of JSONSchemaBench"):
        main([str(tmp_path)])


def test_masks_agree_with_texts() -> None:
    """An end that the grammar does not allow is refused with masks and without."""
    follower = Follower(Vocabulary(Checkpoint.find(embedded_model())))
    start = follower.matcher(follower.compile(json.dumps(COUNTED)).grammar)
    for text, is_accepted in (('{"n": 5}', True), ('{"n": 5', False), ('{"n": }', False), ("", False), ("x", False)):
        for follow in (follower.follow, follower.follow_with_masks):
            outcome = follow(start, text)
            assert outcome.is_accepted == is_accepted, text
            assert outcome.before + outcome.after == text


@pytest.mark.parametrize(
    "text",
    [
        r'{"\u006e": 5}',  # parsers read it as {"n": 5}
        r'{"\u006E": "x"}',
        '{"n": 5}',
        '{"n": "x",' + " " * 200 + '"m": 5}',
        '{"n": "x"' + "\n" * 200 + "}",
    ],
)
def test_names_and_white_space_have_one_form(text: str) -> None:
    """A name that is written with escapes would miss its schema, and white space without bounds has no end."""
    follower = Follower(Vocabulary(Checkpoint.find(embedded_model())))
    start = follower.matcher(follower.compile('{"type": "object", "properties": {"n": {"type": "string"}}}').grammar)
    assert follower.follow(start, '{"n": "x", "m": 5}').is_accepted
    assert not follower.follow(start, text).is_accepted


def test_forced_text_may_be_divided_in_another_way() -> None:
    """After "r" the text "equire" is forced, and a mask has one token for it, which need not be the tokenizer's."""
    follower = Follower(Vocabulary(Checkpoint.find(embedded_model())))
    start = follower.matcher(follower.compile('{"enum": ["required", "requires", "rat"]}').grammar)
    assert follower.follow_with_masks(start, '"required"').is_accepted
    assert follower.num_forced == 1
    assert not follower.follow_with_masks(start, '"requirex"').is_accepted


@pytest.mark.parametrize(
    "options", [{"lenient": True}, {"coerce_one_of": True}, {"item_separator": ".*"}, {"whitespace_pattern": ".*"}]
)
def test_a_schema_cannot_change_the_options(options: dict[str, Any]) -> None:
    follower = Follower(Vocabulary(Checkpoint.find(embedded_model())))
    schema = {"type": "array", "items": {"oneOf": [{"type": "integer"}, {"minimum": 5}]}, "x-guidance": options}
    assert follower.compile(json.dumps(schema)).problem.startswith("oneOf")
    schema["items"] = {"type": "integer"}
    start = follower.matcher(follower.compile(json.dumps(schema)).grammar)
    assert follower.follow(start, "[1, 2]").is_accepted
    assert not follower.follow(start, "[1 x, 2]").is_accepted


@pytest.mark.parametrize(
    ("problem", "kind", "keywords"),
    [
        ('Unimplemented keys: ["if", "then"]\n<non-verbose/>', "keyword: if, then", ["if", "then"]),
        ("Unknown format: byte", "keyword: format", ["format: byte"]),
        ("oneOf constraints are not supported. Enable …", "keyword: oneOf", ["oneOf"]),
        ("regex parse error:\n  (", "regex: not supported, or not a regular expression", []),
        ("required property 'id' is unsatisfiable", "required property … is unsatisfiable", []),
    ],
)
def test_refusals_have_a_kind(problem: str, kind: str, keywords: list[str]) -> None:
    assert (refusal(problem), refused_keywords(problem)) == (kind, keywords)


@pytest.mark.parametrize(
    ("before", "after", "error", "reason"),
    [
        ('{"a": 1', "e-06}", "", "the form of a number"),
        ('{"a": 2', ".0}", "", "the form of a number"),
        ('{"a": {', '"b": 1}}', "", "between values"),
        ('{"a": 1, "b', 'c": 1}', "", "a name"),
        ('{"a": ["x", "y', 'z"]}', "", "a text"),
        ('{"a": "x: {', 'z"}', "", "a text"),
        ("{\n  ", '   "a"', "", "white space"),
        ('{"a": "x', 'y"}', "lexer error: too many expressions constructed", "a limit"),
    ],
)
def test_what_is_not_accepted_has_a_reason(before: str, after: str, error: str, reason: str) -> None:
    assert why_not_accepted(Followed(False, before, after, error)).startswith(reason)


def test_the_violated_keyword_is_named() -> None:
    assert violated_keyword({"type": "array", "uniqueItems": True}, [1, 1]) == "uniqueItems"
    assert violated_keyword({"type": "string", "format": "ipv4"}, "x") == "format"
