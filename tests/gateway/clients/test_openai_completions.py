"""Completions and models with the package `openai`, from the gateway of `quire serve`."""

from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from quire import AsyncClient, Client
from tests.support.e2e.block_maps import is_idle, until_map
from tests.support.gateway.served import MODEL, PROMPT

GREEDY: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 12}


def test_the_text_is_that_of_the_schedulers_own_protocol(openai: OpenAI, quire: Client) -> None:
    expected = quire.complete(PROMPT, temperature=0, max_tokens=40)
    answer = openai.completions.create(**GREEDY | {"max_tokens": 40})
    assert answer.object == "text_completion"
    assert [choice.text for choice in answer.choices] == [expected.text]
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (expected.prompt_tokens, 40)


async def test_async_calls_and_streams_give_the_same_text(openai_async: AsyncOpenAI, openai: OpenAI) -> None:
    expected = openai.completions.create(**GREEDY).choices[0].text
    assert (await openai_async.completions.create(**GREEDY)).choices[0].text == expected
    stream = await openai_async.completions.create(**GREEDY, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == expected
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12


@pytest.mark.parametrize("is_streamed", [False, True])
def test_several_prompts_with_several_choices(openai: OpenAI, quire: Client, is_streamed: bool) -> None:
    prompts = [PROMPT, "One day, a little fox"]
    wanted: dict[str, Any] = GREEDY | {"prompt": prompts, "n": 2, "temperature": 1, "seed": 4}
    expected = [quire.complete(each, n=2, temperature=1, seed=4, max_tokens=12) for each in prompts]
    texts = dict.fromkeys(range(4), "")
    if is_streamed:
        for chunk in openai.completions.create(**wanted, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
    else:
        texts = {choice.index: choice.text for choice in openai.completions.create(**wanted).choices}
    assert list(texts.values()) == [text for each in expected for text in each.texts]


def test_token_ids_as_prompts(openai: OpenAI, quire: Client) -> None:
    ids = [1, 300, 301, 302, 303]
    expected = quire.complete(ids, temperature=0, max_tokens=12).text
    for prompt in (ids, [ids]):
        assert openai.completions.create(**GREEDY | {"prompt": prompt}).choices[0].text == expected


def test_echo_with_logprobs_gives_those_of_the_prompt(openai: OpenAI, quire: Client) -> None:
    """This is how lm-eval asks for log-likelihoods."""
    expected = quire.complete(PROMPT, temperature=0, max_tokens=1, prompt_logprobs=1, logprobs=1)
    (choice,) = openai.completions.create(**GREEDY | {"max_tokens": 1, "echo": True, "logprobs": 1}).choices
    assert choice.text == PROMPT + expected.text
    assert choice.logprobs is not None
    logprobs = choice.logprobs.token_logprobs or []
    assert logprobs[0] is None
    assert len(logprobs) == expected.prompt_tokens + 1
    assert logprobs[1:-1] == pytest.approx([each.chosen.logprob for each in expected.prompt_logprobs])
    assert len(choice.logprobs.tokens or []) == len(choice.logprobs.top_logprobs or []) == len(logprobs)
    (nothing,) = openai.completions.create(**GREEDY | {"max_tokens": 0, "echo": True}).choices
    assert nothing.text == PROMPT


def test_the_best_of_several_is_returned(openai: OpenAI) -> None:
    wanted: dict[str, Any] = GREEDY | {"temperature": 1, "seed": 6, "logprobs": 0, "extra_body": {"ignore_eos": True}}

    def means(**fields: Any) -> list[float]:
        choices = openai.completions.create(**wanted, **fields).choices
        return [sum(choice.logprobs.token_logprobs or []) / 12 for choice in choices if choice.logprobs]

    everything = means(n=4)
    assert len(everything) == 4
    assert means(n=1, best_of=4) == pytest.approx([max(everything)])


def test_stop_strings_and_logit_bias(openai: OpenAI) -> None:
    whole = openai.completions.create(**GREEDY).choices[0].text
    stop = whole.split()[3]
    (stopped,) = openai.completions.create(**GREEDY, stop=stop).choices
    assert (stopped.text, stopped.finish_reason) == (whole[: whole.index(stop)], "stop")
    (biased,) = openai.completions.create(**GREEDY, logit_bias={"300": 100}).choices
    assert biased.text != whole


def test_without_a_bound_sixteen_tokens_are_generated(openai: OpenAI) -> None:
    usage = openai.completions.create(model=MODEL, prompt=PROMPT, extra_body={"ignore_eos": True}).usage
    assert usage is not None
    assert usage.completion_tokens == 16


def test_models(openai: OpenAI) -> None:
    assert [model.id for model in openai.models.list()] == [MODEL]
    model = openai.models.retrieve(MODEL)
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "quire")
    assert (model.model_extra or {})["max_model_len"] == 2048


def test_tokens_and_texts(openai: OpenAI) -> None:
    """The library has no methods for these endpoints of vLLM, but posts to any path."""
    root = openai.with_options(base_url=str(openai.base_url).removesuffix("v1/"))
    tokens = root.post("/tokenize", body={"model": MODEL, "prompt": PROMPT}, cast_to=object)
    assert isinstance(tokens, dict)
    assert tokens["count"] == len(tokens["tokens"])
    assert tokens["tokens"][0] == 1  # the token that begins a text
    text = root.post("/detokenize", body={"model": MODEL, "tokens": tokens["tokens"][1:]}, cast_to=object)
    assert text == {"prompt": PROMPT}


async def test_a_stream_that_is_closed_early_frees_its_blocks(openai_async: AsyncOpenAI, observer: AsyncClient) -> None:
    wanted: dict[str, Any] = GREEDY | {"prompt": [PROMPT] * 3, "max_tokens": 1900, "extra_body": {"ignore_eos": True}}
    stream = await openai_async.completions.create(**wanted, stream=True)
    seen: set[int] = set()
    async for chunk in stream:
        seen.add(chunk.choices[0].index)
        if len(seen) == 3:
            break
    assert not is_idle(await observer.block_map())
    await stream.close()
    await until_map(observer, is_idle)
