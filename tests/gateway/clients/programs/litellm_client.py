"""The package `litellm`."""

import json
from typing import Any

import litellm
from common import (
    CHAT,
    EXTRA,
    KEY,
    MODEL,
    NAMED,
    NUM_SCHEMA_TOKENS,
    NUM_TOKENS,
    OTHER,
    PROMPT,
    STOP,
    TOOL_CHAT,
    TOOLS,
    URL,
    WEATHER,
    Animal,
    cancelled,
    joined_call,
    one_call,
    run,
)

SERVER: dict[str, Any] = {"api_base": URL, "api_key": KEY, "max_retries": 0}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": NUM_TOKENS, **SERVER}


def chat(**fields: Any) -> Any:
    return litellm.completion(**{"model": f"openai/{MODEL}", "messages": CHAT} | GREEDY | fields)


def text(**fields: Any) -> Any:
    return chat(**fields).choices[0].message.content


def completion(**fields: Any) -> Any:
    return litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt=PROMPT, **GREEDY | fields)


FORCED: dict[str, Any] = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 200}


def usage() -> list[int]:
    *_, last = chat(stream=True, stream_options={"include_usage": True})
    return [last.usage.prompt_tokens, last.usage.completion_tokens]


def leave() -> None:
    stream = chat(stream=True, max_tokens=1900, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.completion_stream.close()


run(
    {
        "chat": text,
        "chat, streamed": lambda: [chunk.choices[0].delta.content for chunk in chat(stream=True)],
        "completion": lambda: completion().choices[0].text,
        "completion, streamed": lambda: [chunk.choices[0].text for chunk in completion(stream=True)],
        "several choices": lambda: [choice.message.content for choice in chat(n=3, seed=3, temperature=1).choices],
        "seed": lambda: text(seed=5, temperature=1),
        "stop": lambda: text(stop=[STOP]),
        "log-probabilities": lambda: [
            entry["bytes"] for entry in chat(logprobs=True, top_logprobs=2).choices[0].logprobs["content"]
        ],
        "usage of a stream": usage,
        "tools and results": lambda: text(messages=TOOL_CHAT, tools=TOOLS),
        "tool call": lambda: one_call(chat(**FORCED).choices[0]),
        "tool call, streamed": lambda: joined_call(chat(stream=True, **FORCED)),
        "named tool": lambda: one_call(chat(**FORCED | {"tools": [OTHER, WEATHER], "tool_choice": NAMED}).choices[0]),
        "fields of vLLM": lambda: text(extra_body=EXTRA),
        "models": lambda: litellm.get_valid_models(
            check_provider_endpoint=True, custom_llm_provider="openai", api_key=KEY, api_base=URL.removesuffix("/v1")
        ),
        "structured output": lambda: json.loads(text(response_format=Animal, max_tokens=NUM_SCHEMA_TOKENS)),
        "bad request": lambda: text(temperature=-1),
        "too long": lambda: text(max_tokens=4000),
        "unknown model": lambda: text(model="openai/gpt-9"),
        "cancelled stream": lambda: cancelled(leave),
    }
)
