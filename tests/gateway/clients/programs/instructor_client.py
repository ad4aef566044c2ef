"""The package `instructor`: with a response model as a schema and as a tool that is forced, and without one."""

from typing import Any, Literal

import instructor
from common import (
    CHAT,
    EXTRA,
    KEY,
    MODEL,
    NUM_SCHEMA_TOKENS,
    NUM_TOKENS,
    STOP,
    TOOL_CHAT,
    TOOLS,
    URL,
    Animal,
    cancelled,
    run,
)
from openai import OpenAI
from pydantic import BaseModel, Field

server = OpenAI(base_url=URL, api_key=KEY, max_retries=0)
client = instructor.from_openai(server, mode=instructor.Mode.MD_JSON)
strict_client = instructor.from_openai(server, mode=instructor.Mode.JSON_SCHEMA)
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": NUM_TOKENS}


def chat(**fields: Any) -> Any:
    return client.chat.completions.create(**{"response_model": None, "messages": CHAT} | GREEDY | fields)


def text(**fields: Any) -> Any:
    return chat(**fields).choices[0].message.content


def parsed() -> object:
    fields = GREEDY | {"max_tokens": NUM_SCHEMA_TOKENS}
    answer = strict_client.chat.completions.create(response_model=Animal, messages=CHAT, max_retries=0, **fields)
    return answer.model_dump()


class Weather(BaseModel, extra="forbid"):
    """The weather of a city."""

    city: Literal["Rome", "Paris"] = Field(description="where")


def called() -> list[Any]:
    """Returns the call, in the form of the other clients."""
    forcing = instructor.from_openai(OpenAI(base_url=URL, api_key=KEY, max_retries=0), mode=instructor.Mode.TOOLS)
    fields = GREEDY | {"max_tokens": 200}
    found, answer = forcing.chat.completions.create_with_completion(
        response_model=Weather, messages=CHAT, max_retries=0, **fields
    )
    return [type(found).__name__.lower(), found.model_dump(), answer.choices[0].finish_reason]


def leave() -> None:
    with chat(stream=True, max_tokens=1900, extra_body={"ignore_eos": True}) as stream:
        next(iter(stream))


run(
    {
        "chat": text,
        "chat, streamed": lambda: [chunk.choices[0].delta.content for chunk in chat(stream=True)],
        "several choices": lambda: [choice.message.content for choice in chat(n=3, seed=3, temperature=1).choices],
        "seed": lambda: text(seed=5, temperature=1),
        "stop": lambda: text(stop=[STOP]),
        "tools and results": lambda: text(messages=TOOL_CHAT, tools=TOOLS),
        "named tool": called,
        "fields of vLLM": lambda: text(extra_body=EXTRA),
        "structured output": parsed,
        "bad request": lambda: text(temperature=-1),
        "too long": lambda: text(max_tokens=4000),
        "unknown model": lambda: text(model="gpt-9"),
        "cancelled stream": lambda: cancelled(leave),
    }
)
