"""Chat completions with the package `openai`, from the gateway of `quire serve`."""

import itertools
import math
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from quire import AsyncClient, Client
from tests.support.e2e.block_maps import is_idle, until_map
from tests.support.gateway.served import CHAT, MODEL

GREEDY: dict[str, Any] = {"model": MODEL, "messages": CHAT, "temperature": 0, "max_tokens": 12}


def test_the_text_is_that_of_the_schedulers_own_protocol(openai: OpenAI, quire: Client) -> None:
    expected = quire.complete(CHAT, temperature=0, max_tokens=40)
    answer = openai.chat.completions.create(**GREEDY | {"max_tokens": 40})
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert choice.finish_reason == "length"
    assert choice.logprobs is None
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == expected.prompt_tokens
    assert answer.usage.completion_tokens == 40
    assert answer.usage.total_tokens == expected.prompt_tokens + 40


async def test_async_calls_and_streams_give_the_same_text(openai_async: AsyncOpenAI, openai: OpenAI) -> None:
    expected = openai.chat.completions.create(**GREEDY).choices[0].message.content
    answer = await openai_async.chat.completions.create(**GREEDY)
    assert answer.choices[0].message.content == expected
    stream = await openai_async.chat.completions.create(**GREEDY, stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert all(chunk.usage is None for chunk in chunks)


def test_the_stream_helper_assembles_the_same_answer(openai: OpenAI) -> None:
    whole = openai.chat.completions.create(**GREEDY).choices[0].message.content or ""
    wanted: dict[str, Any] = GREEDY | {"stop": whole.split()[3]}  # the helper raises an error for what max_tokens ended
    expected = openai.chat.completions.create(**wanted)
    with openai.chat.completions.stream(**wanted, stream_options={"include_usage": True}) as stream:
        kinds = {event.type for event in stream}
        answer = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert answer.choices[0].message.content == expected.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert expected.usage is not None
    assert answer.usage.total_tokens == expected.usage.total_tokens


def test_the_usage_is_the_last_chunk_of_a_stream(openai: OpenAI) -> None:
    chunks = list(openai.chat.completions.create(**GREEDY, stream=True, stream_options={"include_usage": True}))
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens == 12
    assert usage.total_tokens == usage.prompt_tokens + 12


def test_a_repeated_prompt_is_found_in_the_cache(openai: OpenAI) -> None:
    long = [{"role": "user", "content": "A bear and a bee went to the lake. " * 20}]
    usages = [openai.chat.completions.create(**GREEDY | {"messages": long}).usage for _ in range(2)]
    cached = [usage.prompt_tokens_details.cached_tokens for usage in usages if usage and usage.prompt_tokens_details]
    assert cached[0] == 0
    assert cached[1] is not None
    assert cached[1] >= 64


@pytest.mark.parametrize("is_streamed", [False, True])
def test_several_choices(openai: OpenAI, quire: Client, is_streamed: bool) -> None:
    expected = quire.complete(CHAT, seed=3, n=3, max_tokens=12, temperature=1)
    wanted: dict[str, Any] = GREEDY | {"temperature": 1, "seed": 3, "n": 3}
    texts = {0: "", 1: "", 2: ""}
    if is_streamed:
        for chunk in openai.chat.completions.create(**wanted, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    else:
        for choice in openai.chat.completions.create(**wanted).choices:
            texts[choice.index] = choice.message.content or ""
    assert texts == dict(enumerate(expected.texts))
    assert len(set(texts.values())) == 3


@pytest.mark.parametrize("is_streamed", [False, True])
def test_stop_strings_are_left_out(openai: OpenAI, is_streamed: bool) -> None:
    whole = openai.chat.completions.create(**GREEDY | {"max_tokens": 40}).choices[0].message.content or ""
    stop = whole.split()[5]
    wanted: dict[str, Any] = GREEDY | {"max_tokens": 40, "stop": ["never in a story", stop]}
    if is_streamed:
        chunks = list(openai.chat.completions.create(**wanted, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        (choice,) = openai.chat.completions.create(**wanted).choices
        text, reason = choice.message.content or "", choice.finish_reason
    assert text == whole[: whole.index(stop)]
    assert reason == "stop"


def test_logprobs_have_the_bytes_of_each_token(openai: OpenAI) -> None:
    wanted: dict[str, Any] = GREEDY | {"logprobs": True, "top_logprobs": 3}
    (choice,) = openai.chat.completions.create(**wanted).choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    entries = choice.logprobs.content
    assert len(entries) == 12
    assert b"".join(bytes(entry.bytes or ()) for entry in entries).decode() == choice.message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)  # it is the greedy choice
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1.0001
    chunks = openai.chat.completions.create(**wanted, stream=True)
    streamed = [chunk.choices[0].logprobs.content or [] for chunk in chunks if chunk.choices[0].logprobs]
    assert list(itertools.chain(*streamed)) == entries


def test_a_seed_gives_the_same_text_again(openai: OpenAI) -> None:
    wanted: dict[str, Any] = GREEDY | {"temperature": 1.5, "max_tokens": 20}
    texts = [
        openai.chat.completions.create(**wanted, seed=seed).choices[0].message.content for seed in (11, 11, 12, 13)
    ]
    assert texts[0] == texts[1]
    assert len(set(texts)) > 1


def test_logit_bias_forces_and_forbids_tokens(openai: OpenAI) -> None:
    wanted: dict[str, Any] = GREEDY | {"max_tokens": 4, "logprobs": True}
    (plain,) = openai.chat.completions.create(**wanted).choices
    (forced,) = openai.chat.completions.create(**wanted, logit_bias={"300": 100}).choices
    assert plain.logprobs is not None
    assert forced.logprobs is not None
    assert len({entry.token for entry in forced.logprobs.content or []}) == 1
    assert plain.message.content != forced.message.content


def test_both_names_of_the_bound_of_tokens(openai: OpenAI) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        bounded = {key: value for key, value in GREEDY.items() if key != "max_tokens"} | {name: 5}
        usage = openai.chat.completions.create(**bounded).usage
        assert usage is not None
        assert usage.completion_tokens == 5


def test_penalties_change_the_text(openai: OpenAI) -> None:
    wanted: dict[str, Any] = GREEDY | {"max_tokens": 60}
    plain = openai.chat.completions.create(**wanted).choices[0].message.content
    for name in ("frequency_penalty", "presence_penalty"):
        assert openai.chat.completions.create(**wanted, **{name: 2.0}).choices[0].message.content != plain


def test_messages_with_parts_tools_and_their_results(openai: OpenAI, quire: Client) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": parameters}}
    messages: list[Any] = [
        {"role": "system", "content": "You tell stories."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "How is the weather"}, {"type": "text", "text": "there?"}],
        },
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    answer = openai.chat.completions.create(**GREEDY | {"messages": messages, "tools": [tool], "tool_choice": "auto"})
    assert answer.choices[0].message.content
    without = openai.chat.completions.create(**GREEDY | {"messages": messages})
    assert answer.usage is not None
    assert without.usage is not None
    assert answer.usage.prompt_tokens > without.usage.prompt_tokens  # the template has written the tools
    # An answer can be sent back as the library returns it.
    again = openai.chat.completions.create(**GREEDY | {"messages": [*messages, answer.choices[0].message]})
    assert again.usage is not None
    assert again.usage.prompt_tokens > without.usage.prompt_tokens


def test_fields_of_vllm(openai: OpenAI, quire: Client) -> None:
    options: dict[str, Any] = {
        "top_k": 20, "min_p": 0.02, "repetition_penalty": 1.2, "min_tokens": 3, "ignore_eos": True,
    }  # fmt: skip
    expected = quire.complete(CHAT, seed=5, temperature=1, max_tokens=24, **options)
    wanted: dict[str, Any] = GREEDY | {"temperature": 1, "seed": 5, "max_tokens": 24}
    answer = openai.chat.completions.create(**wanted, extra_body=options)
    assert answer.choices[0].message.content == expected.text


def test_prompt_logprobs(openai: OpenAI) -> None:
    answer = openai.chat.completions.create(**GREEDY, extra_body={"prompt_logprobs": 1})
    assert answer.usage is not None
    assert answer.model_extra is not None
    entries = answer.model_extra["prompt_logprobs"]
    assert len(entries) == answer.usage.prompt_tokens
    assert entries[0] is None
    assert all(-100 < each["logprob"] <= 0 for entry in entries[1:] for each in entry.values() if each["rank"] == 1)


def test_stop_token_ids_and_beams(openai: OpenAI, quire: Client) -> None:
    ids = quire.complete(CHAT, temperature=0, max_tokens=12).token_ids
    answer = openai.chat.completions.create(**GREEDY, extra_body={"stop_token_ids": [ids[6]]})
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == ids.index(ids[6]) + 1
    expected = quire.complete(CHAT, beam_width=4, n=2, max_tokens=12)
    found = openai.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=12, n=2, extra_body={"beam_width": 4})
    assert [choice.message.content for choice in found.choices] == list(expected.texts)


def test_the_last_message_can_be_continued(openai: OpenAI) -> None:
    whole = openai.chat.completions.create(**GREEDY).choices[0].message.content or ""
    begin = " ".join(whole.split(" ")[:4])
    messages = [*CHAT, {"role": "assistant", "content": begin}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    answer = openai.chat.completions.create(**GREEDY | {"messages": messages, "max_tokens": 4}, extra_body=options)
    assert whole.startswith(begin + (answer.choices[0].message.content or ""))


async def test_a_stream_that_is_closed_early_frees_its_blocks(openai_async: AsyncOpenAI, observer: AsyncClient) -> None:
    endless: dict[str, Any] = GREEDY | {"max_tokens": 1900, "stream": True, "extra_body": {"ignore_eos": True}}
    stream = await openai_async.chat.completions.create(**endless)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    assert not is_idle(await observer.block_map())
    await stream.close()
    await until_map(observer, is_idle)
