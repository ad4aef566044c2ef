"""Failures become the exceptions of the package `openai` that its users catch."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai as library
import pytest
from openai import AsyncOpenAI, OpenAI
from typer.testing import CliRunner

from quire.cli.main import app
from tests.support.e2e.block_maps import is_idle, until_map
from tests.support.e2e.stack import Stack
from tests.support.gateway.served import CHAT, KEY, MODEL, PROMPT, served

GREEDY: dict[str, Any] = {"model": MODEL, "messages": CHAT, "temperature": 0, "max_tokens": 12}


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"temperature": -1}, "temperature", "temperature"),
        ({"top_p": 2}, "top_p", "top_p"),
        ({"n": 0}, "n", "n"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens"),
        ({"stop": [""]}, "stop[0]", "stop"),
        ({"logit_bias": {"99999": 1}}, "logit_bias[99999]", "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
        ({"messages": []}, "messages", "at least one"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "robot"),
        ({"stream_options": {"tokens": True}}, "stream_options.tokens", "tokens"),
        ({"extra_body": {"tempature": 1}}, "tempature", "tempature"),
        ({"extra_body": {"chat_template": "{{ 1 }}"}}, "chat_template", "chat_template"),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_bad_fields_are_named(openai: OpenAI, fields: dict[str, Any], param: str, told: str, is_streamed: bool) -> None:
    with pytest.raises(library.BadRequestError) as caught:
        openai.chat.completions.create(**GREEDY | fields, stream=is_streamed)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert told in caught.value.message
    assert openai.chat.completions.create(**GREEDY).choices[0].message.content


@pytest.mark.parametrize("fields", [{"prompt": [300] * 2100}, {"prompt": PROMPT, "max_tokens": 4000}])
def test_what_is_longer_than_the_context_has_its_own_code(openai: OpenAI, fields: dict[str, Any]) -> None:
    with pytest.raises(library.BadRequestError) as caught:
        openai.completions.create(model=MODEL, **fields)
    assert caught.value.code == "context_length_exceeded"
    assert "maximum context length is exceeded: " in caught.value.message
    long = [{"role": "user", "content": "fox " * 3000}]
    with pytest.raises(library.BadRequestError) as caught:
        openai.chat.completions.create(**GREEDY | {"messages": long})
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize("is_streamed", [False, True])
def test_unknown_models_and_paths(openai: OpenAI, is_streamed: bool) -> None:
    with pytest.raises(library.NotFoundError) as caught:
        openai.chat.completions.create(**GREEDY | {"model": "gpt-9"}, stream=is_streamed)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(library.NotFoundError):
        openai.models.retrieve("gpt-9")
    with pytest.raises(library.NotFoundError):
        openai.embeddings.create(model=MODEL, input="x")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}], "tool_choice": "required"}, "tools"),
        ({"extra_body": {"guided_regex": "a"}}, "guided_regex"),
    ],
)
def test_what_is_not_supported_yet_is_refused(openai: OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(library.BadRequestError) as caught:
        openai.chat.completions.create(**GREEDY | fields)
    assert caught.value.param == param


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, str]]:
    """Returns a file of keys, and the keys by name."""
    file = str(tmp_path_factory.mktemp("keys") / "keys.json")
    made = {}
    for name, role in (("user", "generate"), ("watcher", "observe")):
        added = CliRunner().invoke(app, ("keys", "add", name, "--file", file, "--role", role))
        made[name] = added.stdout.strip()
    return file, made


@pytest.fixture(scope="module")
def narrow_stack(tmp_path_factory: pytest.TempPathFactory, keys: tuple[str, dict[str, str]]) -> Iterator[Stack]:
    """Serves one request at a time, and one more waits; callers need a key."""
    file, _ = keys
    with served(tmp_path_factory.mktemp("narrow"), api_keys=file, max_num_seqs=1, max_waiting_requests=1) as stack:
        yield stack


def test_keys(narrow_stack: Stack, keys: tuple[str, dict[str, str]]) -> None:
    narrow_stack.show_log()
    _, made = keys
    client = OpenAI(base_url=f"http://{narrow_stack.openai}/v1", api_key=made["user"], max_retries=0)
    assert client.chat.completions.create(**GREEDY).choices[0].message.content
    for key in (KEY, made["user"][:-1], f"{made['user']}x"):
        stranger = client.with_options(api_key=key)
        for call, fields in (
            (stranger.chat.completions.create, GREEDY),
            (stranger.chat.completions.create, GREEDY | {"stream": True}),
            (stranger.completions.create, {"model": MODEL, "prompt": PROMPT}),
            (stranger.models.list, {}),
        ):
            with pytest.raises(library.AuthenticationError) as caught:
                call(**fields)
            assert caught.value.code == "invalid_api_key"
    with pytest.raises(library.PermissionDeniedError):
        client.with_options(api_key=made["watcher"]).chat.completions.create(**GREEDY)


async def test_a_full_queue_says_when_to_try_again(narrow_stack: Stack, keys: tuple[str, dict[str, str]]) -> None:
    narrow_stack.show_log()
    _, made = keys
    endless: dict[str, Any] = GREEDY | {"max_tokens": 1900, "stream": True, "extra_body": {"ignore_eos": True}}
    async with (
        AsyncOpenAI(base_url=f"http://{narrow_stack.openai}/v1", api_key=made["user"], max_retries=0) as client,
        narrow_stack.client(api_key=made["watcher"]) as observer,
    ):
        running = await client.chat.completions.create(**endless)
        waiting = asyncio.create_task(client.chat.completions.create(**endless))
        await until_map(observer, lambda found: found.num_waiting == 1)
        for options in ({}, {"stream": True}):
            with pytest.raises(library.RateLimitError) as caught:
                await client.chat.completions.create(**GREEDY | options)
            assert caught.value.code == "rate_limit_exceeded"
            assert int(caught.value.response.headers["retry-after"]) >= 1
        patient = asyncio.create_task(client.with_options(max_retries=10).chat.completions.create(**GREEDY))
        await running.close()
        await (await waiting).close()
        assert (await patient).choices[0].message.content  # the library has waited and tried again
        await until_map(observer, is_idle)
