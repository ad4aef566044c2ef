"""Structured output in each API: what its fields become, what is refused, and whose name an error has."""

import json
from typing import Any

import grpc
import pytest

from gateway.api.anthropic import parse_message
from gateway.api.chat import parse_chat
from gateway.api.completions import parse_completion
from gateway.api.endpoint import ParsedRequest
from gateway.api.errors import ApiError
from gateway.api.responses import parse_response
from gateway.api.structured_output import MAX_CHOICES
from quire.v1 import generation_pb2 as pb
from tests.support.gateway.fake_scheduler import MODEL, Answer, Failure, delta, started
from tests.support.gateway.rig import Rig

SCHEMA = {"type": "object", "properties": {"z": {"const": "ü"}, "a": {"type": "integer"}}, "required": ["z"]}
NAMED = {"name": "story", "schema": SCHEMA, "strict": True, "description": "of a fox"}
MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": MESSAGES},
    "completions": {"prompt": "hi"},
    "responses": {"input": "hi"},
    "messages": {"messages": MESSAGES, "max_tokens": 5},
}
PARSERS = {
    "chat/completions": parse_chat,
    "completions": parse_completion,
    "responses": parse_response,
    "messages": parse_message,
}
OPENAI = ("chat/completions", "completions")


def parsed(endpoint: str, fields: dict[str, Any]) -> ParsedRequest:
    return PARSERS[endpoint](BODIES[endpoint] | fields)


def grammar(endpoint: str, fields: dict[str, Any]) -> pb.StructuredOutput | None:
    (request,) = parsed(endpoint, fields).requests
    return request.structured_output if request.HasField("structured_output") else None


def schema_format(**more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": NAMED | more}}


SCHEMAS: list[tuple[str, dict[str, Any], str]] = [
    *((each, schema_format(), "response_format.json_schema.schema") for each in OPENAI),
    *((each, {"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json") for each in OPENAI),
    *((each, {"structured_outputs": {"json": json.dumps(SCHEMA)}}, "structured_outputs.json") for each in OPENAI),
    ("responses", {"text": {"format": {"type": "json_schema"} | NAMED}}, "text.format.schema"),
    (
        "messages",
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        "output_config.format.schema",
    ),
    ("messages", {"output_format": {"type": "json_schema", "schema": SCHEMA}}, "output_format.schema"),
]
OTHERS: list[tuple[str, dict[str, Any], str, pb.StructuredOutput]] = [
    *(
        (each, fields, place, expected)
        for each in OPENAI
        for fields, place, expected in (
            ({"response_format": {"type": "json_object"}}, "response_format", pb.StructuredOutput(json_object=True)),
            (
                {"structured_outputs": {"json_object": True}},
                "structured_outputs.json_object",
                pb.StructuredOutput(json_object=True),
            ),
            ({"structured_outputs": {"regex": "a+"}}, "structured_outputs.regex", pb.StructuredOutput(regex="a+")),
            (
                {"structured_outputs": {"choice": ["yes", "nö"]}},
                "structured_outputs.choice",
                pb.StructuredOutput(choice=pb.StructuredOutput.Choices(texts=["yes", "nö"])),
            ),
            (
                {"structured_outputs": {"grammar": 'start: "a"'}},
                "structured_outputs.grammar",
                pb.StructuredOutput(lark='start: "a"'),
            ),
            (
                {"structured_outputs": {"regex": "a", "json": None, "json_object": False, "choice": None}},
                "structured_outputs.regex",
                pb.StructuredOutput(regex="a"),
            ),
        )
    ),
    ("responses", {"text": {"format": {"type": "json_object"}}}, "text.format", pb.StructuredOutput(json_object=True)),
]


@pytest.mark.parametrize(("endpoint", "fields", "place"), SCHEMAS)
def test_schemas_reach_the_scheduler_in_their_order(endpoint: str, fields: dict[str, Any], place: str) -> None:
    output = grammar(endpoint, fields)
    assert output is not None
    assert output.WhichOneof("grammar") == "json_schema"
    assert json.dumps(json.loads(output.json_schema)) == json.dumps(SCHEMA)  # the order of properties is the answer's


@pytest.mark.parametrize(("endpoint", "fields", "place", "expected"), OTHERS)
def test_other_grammars_reach_the_scheduler(
    endpoint: str, fields: dict[str, Any], place: str, expected: pb.StructuredOutput
) -> None:
    assert grammar(endpoint, fields) == expected


@pytest.mark.parametrize("strict", [True, False, None])
def test_a_schema_is_enforced_whatever_strict_says(strict: bool | None) -> None:
    assert grammar("chat/completions", schema_format(strict=strict)) == grammar("chat/completions", schema_format())


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        *((each, {"response_format": {"type": "text"}}) for each in OPENAI),
        *((each, {"response_format": None, "structured_outputs": None}) for each in OPENAI),
        ("responses", {"text": {"format": {"type": "text"}}}),
        ("responses", {"text": {}}),
        ("messages", {"output_config": {}}),
        ("messages", {"output_config": {"task_budget": None, "format": None}}),
    ],
)
def test_text_without_a_grammar_may_be_asked_for(endpoint: str, fields: dict[str, Any]) -> None:
    assert parsed(endpoint, fields).requests == parsed(endpoint, {}).requests


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("chat/completions", {"response_format": "json"}, "response_format"),
    ("chat/completions", {"response_format": {}}, "response_format.type"),
    ("chat/completions", {"response_format": {"type": "xml"}}, "response_format.type"),
    ("chat/completions", {"response_format": {"type": ["text"]}}, "response_format.type"),
    ("chat/completions", {"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
    ("chat/completions", {"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
    ("chat/completions", {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ("chat/completions", {"response_format": {"type": "json_schema", "json_schema": 5}}, "response_format.json_schema"),
    ("chat/completions", schema_format(name=None), "response_format.json_schema.name"),
    ("chat/completions", schema_format(name=5), "response_format.json_schema.name"),
    ("chat/completions", schema_format(schema=None), "response_format.json_schema.schema"),
    ("chat/completions", schema_format(schema=True), "response_format.json_schema.schema"),
    ("chat/completions", schema_format(schema="{}"), "response_format.json_schema.schema"),
    ("chat/completions", schema_format(schema={"const": "\ud800"}), "response_format.json_schema.schema"),
    ("chat/completions", schema_format(schema={"const": float("nan")}), "response_format.json_schema.schema"),
    ("chat/completions", schema_format(strict="yes"), "response_format.json_schema.strict"),
    ("chat/completions", schema_format(description=5), "response_format.json_schema.description"),
    ("chat/completions", schema_format(colour="red"), "response_format.json_schema.colour"),
    ("chat/completions", {"structured_outputs": 5}, "structured_outputs"),
    ("chat/completions", {"structured_outputs": {}}, "structured_outputs"),
    ("chat/completions", {"structured_outputs": {"json_object": False}}, "structured_outputs"),
    ("chat/completions", {"structured_outputs": {"json_object": "yes"}}, "structured_outputs.json_object"),
    ("chat/completions", {"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ("chat/completions", {"structured_outputs": {"json": []}}, "structured_outputs.json"),
    ("chat/completions", {"structured_outputs": {"json": "\ud800"}}, "structured_outputs.json"),
    ("chat/completions", {"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
    ("chat/completions", {"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ("chat/completions", {"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
    ("chat/completions", {"structured_outputs": {"choice": ["a", 5]}}, "structured_outputs.choice[1]"),
    ("chat/completions", {"structured_outputs": {"choice": ["a"] * (MAX_CHOICES + 1)}}, "structured_outputs.choice"),
    ("chat/completions", {"structured_outputs": {"grammar": {}}}, "structured_outputs.grammar"),
    (
        "chat/completions",
        {"structured_outputs": {"regex": "a", "structural_tag": "{}"}},
        "structured_outputs.structural_tag",
    ),
    ("chat/completions", {"structured_outputs": {"regex": "a", "backend": "x"}}, "structured_outputs.backend"),
    ("chat/completions", schema_format() | {"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ("chat/completions", {"guided_json": SCHEMA}, "guided_json"),
    ("completions", schema_format(name=None), "response_format.json_schema.name"),
    ("completions", {"structured_outputs": {}}, "structured_outputs"),
    ("responses", {"text": {"format": "json"}}, "text.format"),
    ("responses", {"text": {"format": {"type": "json_schema"}}}, "text.format.name"),
    ("responses", {"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ("responses", {"text": {"format": {"type": "grammar", "grammar": "x"}}}, "text.format.grammar"),
    ("responses", {"response_format": {"type": "json_object"}}, "response_format"),
    ("messages", {"output_config": 5}, "output_config"),
    ("messages", {"output_config": {"effort": 5}}, "output_config.effort"),
    ("messages", {"output_config": {"format": {"type": "json_object"}}}, "output_config.format.type"),
    ("messages", {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ("messages", {"output_format": {"type": "json_schema"} | NAMED}, "output_format.name"),
    (
        "messages",
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "output_format": {"type": "text"}},
        "output_format",
    ),
]


@pytest.mark.parametrize(("endpoint", "fields", "param"), BAD, ids=lambda value: str(value)[:60])
def test_bad_fields_are_named(endpoint: str, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parsed(endpoint, fields)
    assert (caught.value.status, caught.value.kind, caught.value.param) == (400, "invalid_request_error", param)


def test_a_schema_of_very_many_levels_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"not": schema}
    with pytest.raises(ApiError, match=r"response_format\.json_schema\.schema: must have fewer levels"):
        parsed("chat/completions", schema_format(schema=schema))


@pytest.mark.parametrize(
    ("endpoint", "fields", "place"), [*SCHEMAS, *((endpoint, fields, place) for endpoint, fields, place, _ in OTHERS)]
)
def test_what_the_scheduler_refuses_has_the_name_of_the_clients_field(
    endpoint: str, fields: dict[str, Any], place: str
) -> None:
    sent = grammar(endpoint, fields)
    assert sent is not None
    names = parsed(endpoint, fields).names
    assert names["structured_output"] == place
    assert names[f"structured_output.{sent.WhichOneof('grammar')}"] == place


async def test_a_schema_that_the_scheduler_refuses_is_a_bad_request() -> None:
    async def refusing(request: pb.GenerateRequest) -> Answer:
        assert json.loads(request.structured_output.json_schema) == SCHEMA
        raise Failure(
            grpc.StatusCode.INVALID_ARGUMENT,
            "bad",
            violations={"structured_output.json_schema": 'Unimplemented keys: ["not"]'},
        )
        yield

    async with Rig() as rig:
        rig.fake.answer = refusing
        for endpoint, fields, place in SCHEMAS:
            status, body = await rig.post(f"/v1/{endpoint}", {"model": MODEL} | BODIES[endpoint] | fields)
            assert status == 400
            assert body["error"]["type"] == "invalid_request_error"
            assert body["error"]["message"] == f'{place}: Unimplemented keys: ["not"]'
            assert endpoint == "messages" or body["error"]["param"] == place


async def test_a_grammar_that_fails_during_the_answer_is_named() -> None:
    async def failing(request: pb.GenerateRequest) -> Answer:
        yield started()
        yield delta(0, "{", 10)
        raise Failure(grpc.StatusCode.INVALID_ARGUMENT, "structured_output: the grammar is too expensive to follow")

    async with Rig() as rig:
        rig.fake.answer = failing
        body = {"model": MODEL} | BODIES["chat/completions"] | schema_format()
        status, answer = await rig.post("/v1/chat/completions", body)
        *_, last = await rig.events("/v1/chat/completions", body)
    place = "response_format.json_schema.schema"
    assert (status, answer["error"]["param"]) == (400, place)
    assert last["error"] == answer["error"]
    assert answer["error"]["message"] == f"{place}: the grammar is too expensive to follow"


async def test_a_response_repeats_its_format() -> None:
    form = {"type": "json_schema"} | NAMED
    async with Rig() as rig:
        _, plain = await rig.post("/v1/responses", {"model": MODEL, "input": "hi"})
        _, formatted = await rig.post("/v1/responses", {"model": MODEL, "input": "hi", "text": {"format": form}})
    assert plain["text"] == {"format": {"type": "text"}}
    assert formatted["text"] == {"format": form}
