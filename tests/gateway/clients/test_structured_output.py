"""Structured output with the package `openai`, from the gateway of `quire serve`."""

import asyncio
import json
import os
import re
from typing import Any, Literal

import jsonschema
import pytest
from jsonschema.validators import validator_for
from openai import AsyncOpenAI, BadRequestError, LengthFinishReasonError, OpenAI, pydantic_function_tool
from pydantic import BaseModel

from tests.support.gateway.random_schemas import RandomSchemas
from tests.support.gateway.served import CHAT, MODEL, PROMPT

SAMPLED: dict[str, Any] = {"model": MODEL, "temperature": 1, "seed": 7, "max_tokens": 1500}
NUM_AT_ONCE = 16


class Fox(BaseModel, extra="forbid"):
    kind: Literal["fox"]
    mood: Literal["happy", "sad"]
    ages: tuple[Literal[1, 2], Literal[3]]


class Hen(BaseModel, extra="forbid"):
    eggs: Literal[1, 2]


SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"const": "fox"},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 9}, "maxItems": 3},
    },
    "required": ["kind", "ages"],
    "additionalProperties": False,
}
FORMAT: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "fox", "schema": SCHEMA, "strict": True}}


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def chat(openai: OpenAI, **fields: Any) -> str:
    (choice,) = openai.chat.completions.create(messages=CHAT, **SAMPLED | fields).choices
    assert choice.finish_reason == "stop"
    return choice.message.content or ""


def test_a_model_of_pydantic_comes_back(openai: OpenAI) -> None:
    answer = openai.chat.completions.parse(messages=CHAT, response_format=Fox, **SAMPLED)
    assert isinstance(answer.choices[0].message.parsed, Fox)


@pytest.mark.parametrize("seed", range(4))
def test_an_agent_gets_a_call_or_an_answer_in_its_format(openai: OpenAI, seed: int) -> None:
    """Agents send their strict tools and the format of their last answer with each request."""
    asked: Any = {"tools": [pydantic_function_tool(Fox)], "response_format": Hen, **SAMPLED, "seed": seed}
    (choice,) = openai.chat.completions.parse(messages=CHAT, **asked).choices
    if choice.finish_reason == "tool_calls":
        assert choice.message.tool_calls
        assert all(isinstance(call.function.parsed_arguments, Fox) for call in choice.message.tool_calls)
    else:
        assert isinstance(choice.message.parsed, Hen)


def test_what_the_helpers_return_can_be_sent_back(openai: OpenAI) -> None:
    """Their messages repeat the content and the arguments as objects."""
    tools = [pydantic_function_tool(Fox)]
    forced: Any = {"type": "function", "function": {"name": "Fox"}}
    text = openai.chat.completions.parse(messages=CHAT, response_format=Fox, **SAMPLED).choices[0].message
    called = openai.chat.completions.parse(messages=CHAT, tools=tools, tool_choice=forced, **SAMPLED).choices[0].message
    with openai.chat.completions.stream(messages=CHAT, tools=tools, tool_choice=forced, **SAMPLED) as events:
        streamed = events.get_final_completion().choices[0].message
    for message in (called, streamed):
        assert message.tool_calls is not None
        assert isinstance(message.tool_calls[0].function.parsed_arguments, Fox)
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "done"}
        assert openai.chat.completions.create(messages=[*CHAT, message, result], **SAMPLED | {"max_tokens": 4})
    assert text.parsed is not None
    assert openai.chat.completions.create(messages=[*CHAT, text, *CHAT], **SAMPLED | {"max_tokens": 4})


def test_every_choice_follows_the_schema(openai: OpenAI) -> None:
    answer = openai.chat.completions.create(messages=CHAT, response_format=FORMAT, n=4, **SAMPLED)
    assert len(answer.choices) == 4
    for choice in answer.choices:
        jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)


def test_a_stream_has_the_text_of_the_answer_in_one_piece(openai: OpenAI) -> None:
    chunks = openai.chat.completions.create(messages=CHAT, response_format=FORMAT, stream=True, **SAMPLED)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == chat(openai, response_format=FORMAT)
    jsonschema.validate(json.loads(text), SCHEMA)


def test_completions_follow_a_schema(openai: OpenAI) -> None:
    fields = {"extra_body": {"response_format": FORMAT}}
    (choice,) = openai.completions.create(prompt=PROMPT, **SAMPLED, **fields).choices
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.text), SCHEMA)


def test_responses_follow_a_schema(openai: OpenAI) -> None:
    answer = openai.responses.parse(model=MODEL, input="A fox.", text_format=Fox, max_output_tokens=1500, temperature=1)
    assert isinstance(answer.output_parsed, Fox)


def test_other_grammars(openai: OpenAI) -> None:
    def grammar(**kind: Any) -> str:
        return chat(openai, extra_body={"structured_outputs": kind})

    assert grammar(choice=["sly fox", "old bear"]) in ("sly fox", "old bear")
    assert re.fullmatch(r"[a-f]{3}-[0-9]{2}", grammar(regex=r"[a-f]{3}-[0-9]{2}"))
    assert re.fullmatch(r"(ha){1,3}!", grammar(grammar='start: laugh "!"\nlaugh: "ha"{1,3}'))
    jsonschema.validate(json.loads(grammar(json=json.dumps(SCHEMA))), SCHEMA)


def test_a_json_object_is_one(openai: OpenAI) -> None:
    (choice,) = openai.chat.completions.create(
        messages=CHAT, response_format={"type": "json_object"}, **SAMPLED
    ).choices
    assert (choice.message.content or "").startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content or ""), dict)


def test_an_answer_of_full_length_is_the_beginning_of_a_text(openai: OpenAI) -> None:
    with pytest.raises(LengthFinishReasonError) as caught:
        openai.chat.completions.parse(messages=CHAT, response_format=Fox, **SAMPLED | {"max_tokens": 3})
    text = caught.value.completion.choices[0].message.content or ""
    assert text.startswith("{")
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (schema_format({"type": "cat"}), "response_format.json_schema.schema"),
        (schema_format({"not": {}}), "response_format.json_schema.schema"),
        (schema_format({"not": {}, "x-guidance": {"lenient": True}}), "response_format.json_schema.schema"),
        ({"extra_body": {"structured_outputs": {"regex": "("}}}, "structured_outputs.regex"),
        ({"extra_body": {"structured_outputs": {"grammar": "start: missing"}}}, "structured_outputs.grammar"),
        ({"response_format": FORMAT, "extra_body": {"ignore_eos": True}}, "ignore_eos"),
        ({"response_format": FORMAT, "extra_body": {"min_tokens": 2}}, "min_tokens"),
        ({"response_format": FORMAT, "extra_body": {"allowed_token_ids": [5, 6]}}, "allowed_token_ids"),
    ],
)
def test_what_cannot_be_followed_is_a_bad_request(openai: OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        chat(openai, **fields)
    assert caught.value.param == param
    assert chat(openai, response_format=FORMAT)  # others are served as before


@pytest.mark.timeout(1800)
async def test_answers_to_random_schemas_are_valid(openai_async: AsyncOpenAI) -> None:
    """An answer that ends by itself is a text of its schema. NUM_ANSWERS=1000 in the environment asks for more."""
    number = int(os.environ.get("NUM_ANSWERS", "30"))
    is_free = asyncio.Semaphore(NUM_AT_ONCE)

    async def ends(seed: int) -> bool:
        schema = RandomSchemas(seed).draw()
        form: Any = {"type": "json_schema", "json_schema": {"name": "random", "schema": schema}}
        fields = SAMPLED | {"max_tokens": 300, "seed": seed, "response_format": form}
        async with is_free:
            (choice,) = (await openai_async.chat.completions.create(messages=CHAT, **fields)).choices
        if choice.finish_reason != "stop":
            assert choice.finish_reason == "length"
            return False
        value = json.loads(choice.message.content or "")
        validator = validator_for(schema, default=jsonschema.Draft202012Validator)
        validator(schema, format_checker=validator.FORMAT_CHECKER).validate(value)
        return True

    ended = await asyncio.gather(*map(ends, range(number)))
    assert sum(ended) > number // 2
