"""The package `anthropic`. It has no parameter for the temperature, which the server takes all the same."""

import json
from typing import Any, Literal

from anthropic import Anthropic, beta_tool
from common import (
    ADDRESS,
    CHAT,
    KEY,
    MODEL,
    NUM_SCHEMA_TOKENS,
    NUM_TOKENS,
    OTHER,
    SCHEMA,
    STOP,
    TOOL_CHAT,
    WEATHER,
    cancelled,
    run,
)

client = Anthropic(base_url=f"http://{ADDRESS}", api_key=KEY, max_retries=0)
GREEDY: dict[str, Any] = {"model": MODEL, "max_tokens": NUM_TOKENS, "extra_body": {"temperature": 0}}
LONG_LIST = {"type": "array", "items": {"enum": ["Tim", "Mia"]}, "minItems": 300}


def message(**fields: Any) -> Any:
    return client.messages.create(**{"messages": CHAT} | GREEDY | fields)


def text(**fields: Any) -> Any:
    return "".join(block.text for block in message(**fields).content if block.type == "text")


def tool(given: dict[str, Any]) -> dict[str, Any]:
    """Returns a tool of OpenAI's API in the form of this one."""
    function = given["function"]
    parameters = function["parameters"]
    return {"name": function["name"], "description": function["description"], "input_schema": parameters}


FORCED: dict[str, Any] = {"tools": [tool(WEATHER)], "tool_choice": {"type": "any"}, "max_tokens": 200}
NAMED: dict[str, Any] = {
    "tools": [tool(OTHER), tool(WEATHER)],
    "tool_choice": {"type": "tool", "name": "weather"},
    "max_tokens": 200,
}


def tool_conversation() -> object:
    """Sends the content of an answer back as it is, with the result of its call."""
    system, question, _, result = TOOL_CHAT
    answer = message(system=system["content"], messages=[question], **FORCED)
    (call,) = answer.content
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": result["content"]}]
    said = [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    return text(system=system["content"], messages=[question, *said], tools=FORCED["tools"])


def call_of(answer: Any) -> list[Any]:
    """Returns the only call of a message, with the reason under the name that OpenAI's API has for it."""
    (block,) = answer.content
    return [block.name, block.input, "tool_calls" if answer.stop_reason == "tool_use" else answer.stop_reason]


def tool_runner() -> list[Any]:
    """Returns what the library's own loop called, until it has sent the result of the call and has its answer."""
    calls = []

    @beta_tool
    def weather(city: Literal["Paris", "Rome"]) -> str:
        """Tells the weather."""
        calls.append({"city": city})
        return "sunny"

    forced = {"tools": [weather], "tool_choice": FORCED["tool_choice"], "max_tokens": 200}
    *_, last = client.beta.messages.tool_runner(**{"messages": CHAT, "max_iterations": 2} | GREEDY | forced)
    return ["weather", calls[0], "tool_calls" if last.stop_reason == "tool_use" else last.stop_reason]


def streamed(**fields: Any) -> Any:
    return client.messages.stream(**{"messages": CHAT} | GREEDY | fields)


def texts() -> list[str]:
    with streamed() as stream:
        return list(stream.text_stream)


def streamed_call() -> list[Any]:
    with streamed(**FORCED) as stream:
        pieces = "".join(event.partial_json for event in stream if event.type == "input_json")
        answer = stream.get_final_message()
    name, arguments, reason = call_of(answer)
    return [name, arguments if json.loads(pieces) == arguments else pieces, reason]


def usage() -> list[int]:
    with streamed() as stream:
        found = stream.get_final_message().usage
    return [found.input_tokens + found.cache_read_input_tokens, found.output_tokens]


def parsed() -> object:
    form = {"type": "json_schema", "schema": SCHEMA}
    return json.loads(text(output_config={"format": form}, max_tokens=NUM_SCHEMA_TOKENS))


def leave() -> None:
    form = {"type": "json_schema", "schema": LONG_LIST}
    with message(stream=True, max_tokens=1900, output_config={"format": form}) as stream:
        next(iter(stream))


run(
    {
        "chat": text,
        "chat, streamed": texts,
        "stop": lambda: text(stop_sequences=[STOP]),
        "usage of a stream": usage,
        "tools and results": tool_conversation,
        "tool call": lambda: call_of(message(**FORCED)),
        "tool call, streamed": streamed_call,
        "named tool": lambda: call_of(message(**NAMED)),
        "tool runner": tool_runner,
        "models": lambda: [model.id for model in client.models.list()],
        "structured output": parsed,
        "bad request": lambda: text(extra_body={"temperature": -1}),
        "too long": lambda: text(max_tokens=4000),
        "unknown model": lambda: text(model="gpt-9"),
        "cancelled stream": lambda: cancelled(leave),
    }
)
