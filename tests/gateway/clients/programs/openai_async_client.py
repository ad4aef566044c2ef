"""The package `openai`, with asyncio."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

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
from openai import AsyncOpenAI

GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": NUM_TOKENS}
Calling = Callable[[AsyncOpenAI], Awaitable[object]]


def with_client(function: Calling) -> Callable[[], object]:
    async def call() -> object:
        # By default it gives up connecting after five seconds, which is too short beside other tests.
        async with AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0, timeout=120) as client:
            return await function(client)

    return lambda: asyncio.run(call())


async def chat(client: AsyncOpenAI, **fields: Any) -> Any:
    return await client.chat.completions.create(**{"messages": CHAT} | GREEDY | fields)


def text(**fields: Any) -> Callable[[], object]:
    async def call(client: AsyncOpenAI) -> object:
        return (await chat(client, **fields)).choices[0].message.content

    return with_client(call)


async def streamed(client: AsyncOpenAI) -> object:
    return [chunk.choices[0].delta.content async for chunk in await chat(client, stream=True)]


async def completion(client: AsyncOpenAI) -> object:
    return (await client.completions.create(prompt=PROMPT, **GREEDY)).choices[0].text


async def streamed_completion(client: AsyncOpenAI) -> object:
    stream = await client.completions.create(prompt=PROMPT, stream=True, **GREEDY)
    return [chunk.choices[0].text async for chunk in stream]


async def choices(client: AsyncOpenAI) -> object:
    return [choice.message.content for choice in (await chat(client, n=3, seed=3, temperature=1)).choices]


async def logprobs(client: AsyncOpenAI) -> object:
    answer = await chat(client, logprobs=True, top_logprobs=2)
    return [entry.bytes for entry in answer.choices[0].logprobs.content]


FORCED: dict[str, Any] = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 200}


async def call(client: AsyncOpenAI) -> object:
    return one_call((await chat(client, **FORCED)).choices[0])


async def streamed_call(client: AsyncOpenAI) -> object:
    return joined_call([chunk async for chunk in await chat(client, stream=True, **FORCED)])


async def named_tool(client: AsyncOpenAI) -> object:
    fields = FORCED | {"tools": [OTHER, WEATHER], "tool_choice": NAMED}
    return one_call((await chat(client, **fields)).choices[0])


async def usage(client: AsyncOpenAI) -> object:
    chunks = [chunk async for chunk in await chat(client, stream=True, stream_options={"include_usage": True})]
    return [chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens]


async def streamed_and_parsed(client: AsyncOpenAI) -> object:
    fields = GREEDY | {"max_tokens": NUM_SCHEMA_TOKENS}
    async with client.chat.completions.stream(messages=CHAT, response_format=Animal, **fields) as stream:
        answer = await stream.get_final_completion()
    return answer.choices[0].message.parsed.model_dump()


async def models(client: AsyncOpenAI) -> object:
    return [model.id async for model in client.models.list()]


async def leave(client: AsyncOpenAI) -> None:
    async with await chat(client, stream=True, max_tokens=1900, extra_body={"ignore_eos": True}) as stream:
        await anext(aiter(stream))


run(
    {
        "chat": text(),
        "chat, streamed": with_client(streamed),
        "completion": with_client(completion),
        "completion, streamed": with_client(streamed_completion),
        "several choices": with_client(choices),
        "seed": text(seed=5, temperature=1),
        "stop": text(stop=[STOP]),
        "log-probabilities": with_client(logprobs),
        "usage of a stream": with_client(usage),
        "tools and results": text(messages=TOOL_CHAT, tools=TOOLS),
        "tool call": with_client(call),
        "tool call, streamed": with_client(streamed_call),
        "named tool": with_client(named_tool),
        "fields of vLLM": text(extra_body=EXTRA),
        "models": with_client(models),
        "structured output": with_client(streamed_and_parsed),
        "bad request": text(temperature=-1),
        "too long": text(max_tokens=4000),
        "unknown model": text(model="gpt-9"),
        "cancelled stream": lambda: cancelled(with_client(leave)),
    }
)
