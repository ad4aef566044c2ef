"""The package `langchain-openai`."""

from typing import Any

from common import (
    CHAT,
    EXTRA,
    KEY,
    MODEL,
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
    run,
)
from langchain_core.messages import convert_to_messages
from langchain_openai import ChatOpenAI, OpenAI

messages = convert_to_messages(CHAT)
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": NUM_TOKENS, "base_url": URL, "api_key": KEY, "max_retries": 0}


def chat(**fields: Any) -> Any:
    return ChatOpenAI(**{"model": MODEL} | GREEDY | fields)


def text(**fields: Any) -> Any:
    return chat(**fields).invoke(CHAT).content


def completion() -> Any:
    return OpenAI(model=MODEL, **GREEDY)


def only_call(message: Any) -> list[Any]:
    (call,) = message.tool_calls
    return [call["name"], call["args"], message.response_metadata["finish_reason"]]


def streamed_call() -> list[Any]:
    whole = None
    for chunk in chat(max_tokens=200).bind_tools([WEATHER], tool_choice="any").stream(CHAT):
        whole = chunk if whole is None else whole + chunk
    return only_call(whole)


def usage() -> list[int]:
    whole = None
    for chunk in chat(stream_usage=True).stream(CHAT):
        whole = chunk if whole is None else whole + chunk
    return [whole.usage_metadata["input_tokens"], whole.usage_metadata["output_tokens"]]


def parsed() -> object:
    structured = chat(max_tokens=NUM_SCHEMA_TOKENS).with_structured_output(Animal, method="json_schema")
    return structured.invoke(CHAT).model_dump()


def leave() -> None:
    stream = chat(max_tokens=1900, extra_body={"ignore_eos": True}).stream(CHAT)
    next(stream)
    stream.close()


run(
    {
        "chat": text,
        "chat, streamed": lambda: [chunk.content for chunk in chat().stream(CHAT)],
        "completion": lambda: completion().invoke(PROMPT),
        "completion, streamed": lambda: list(completion().stream(PROMPT)),
        "several choices": lambda: [
            each.message.content for each in chat(n=3, seed=3, temperature=1).generate([messages]).generations[0]
        ],
        "seed": lambda: text(seed=5, temperature=1),
        "stop": lambda: text(stop_sequences=[STOP]),
        "log-probabilities": lambda: [
            entry["bytes"]
            for entry in chat(logprobs=True, top_logprobs=2).invoke(CHAT).response_metadata["logprobs"]["content"]
        ],
        "usage of a stream": usage,
        "tools and results": lambda: chat().bind_tools(TOOLS).invoke(TOOL_CHAT).content,
        "tool call": lambda: only_call(chat(max_tokens=200).bind_tools([WEATHER], tool_choice="any").invoke(CHAT)),
        "tool call, streamed": streamed_call,
        "named tool": lambda: only_call(
            chat(max_tokens=200).bind_tools([OTHER, WEATHER], tool_choice="weather").invoke(CHAT)
        ),
        "fields of vLLM": lambda: text(extra_body=EXTRA),
        "structured output": parsed,
        "bad request": lambda: text(temperature=-1),
        "too long": lambda: text(max_tokens=4000),
        "unknown model": lambda: text(model="gpt-9"),
        "cancelled stream": lambda: cancelled(leave),
    }
)
