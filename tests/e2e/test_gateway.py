"""OpenAI's API in front of real services: the same text as over gRPC, also when services are killed."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from tests.support.e2e.process import Process
from tests.support.e2e.stack import QUIRE, Stack
from tests.support.e2e.waiting import until
from tests.support.gateway.rig import content, parsed_events

if TYPE_CHECKING:
    from collections.abc import Iterator

    from quire import AsyncClient

PROMPTS = [f"Once upon a time there was a {animal}" for animal in ("cat", "dog", "fox", "owl")]
NUM_TOKENS = 500
NUM_STREAMS = int(os.environ.get("NUM_STREAMS", str(len(PROMPTS))))
"""Streams that are open when a service dies."""


@pytest.fixture(scope="module")
def served_stack() -> Iterator[Stack]:
    with Stack(gateway=True, gateway_listen="127.0.0.1:0") as stack:
        yield stack


@pytest.fixture
def served(served_stack: Stack) -> Stack:
    """Returns `quire serve` with its gateway."""
    served_stack.show_log()
    return served_stack


async def streamed(http: aiohttp.ClientSession, prompt: str, **fields: Any) -> list[Any]:
    body = {"prompt": prompt, "stream": True, "max_tokens": NUM_TOKENS, "seed": 7, "ignore_eos": True} | fields
    async with http.post("/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        return parsed_events(await response.text())


async def texts(client: AsyncClient, asked: list[tuple[str, int]]) -> list[str]:
    """Returns the text for each prompt and seed, as the scheduler's own protocol gives it."""
    completions = await asyncio.gather(
        *(client.complete(prompt, max_tokens=NUM_TOKENS, seed=seed, ignore_eos=True) for prompt, seed in asked)
    )
    return [completion.text for completion in completions]


@pytest.mark.timeout(600)
async def test_streams_survive_the_death_of_each_service(served: Stack) -> None:
    """Streams of one prompt differ by their seed, which makes each of them a text of its own."""
    asked = [(PROMPTS[i % len(PROMPTS)], 7 + i // len(PROMPTS)) for i in range(NUM_STREAMS)]
    async with aiohttp.ClientSession(f"http://{served.openai}") as http, served.client() as client:
        num_resumed = await _num_resumed(http)
        expected = await texts(client, asked)
        undisturbed = await asyncio.gather(*(streamed(http, prompt) for prompt in PROMPTS))
        assert [content(events) for events in undisturbed] == expected[: len(PROMPTS)]
        for service in ("executor", "scheduler"):
            answers = asyncio.gather(*(streamed(http, prompt, seed=seed) for prompt, seed in asked))
            await until(lambda: _is_running(served, NUM_STREAMS), "all requests run")
            served.send(service, signal.SIGKILL)
            for events, text in zip(await answers, expected, strict=True):
                assert content(events) == text, service
                assert events[-1] == "[DONE]"
        assert await _num_resumed(http) == num_resumed + NUM_STREAMS


@pytest.mark.timeout(600)
async def test_streams_of_one_gateway_survive_the_death_of_another(served: Stack) -> None:
    """Two gateways share a scheduler. The requests of the killed one are freed, and the other one's streams go on."""
    asked = [(prompt, seed) for prompt in PROMPTS[:3] for seed in (7, 8)]
    with ExitStack() as ending:
        async with served.client() as client:
            num_cancelled = await _num_cancelled(served)
            expected = await texts(client, asked)
            gateways = [_gateway(served) for _ in range(2)]
            for gateway in gateways:
                ending.callback(gateway.kill)
            doomed, other = (f"http://{each.line('ready ').split('openai=')[1].strip()}" for each in gateways)
            async with aiohttp.ClientSession(doomed) as lost, aiohttp.ClientSession(other) as http:
                for session in (lost, http):
                    await until(lambda session=session: _is_healthy(session), "the gateway has found the scheduler")
                broken = [asyncio.ensure_future(streamed(lost, prompt, max_tokens=1900)) for prompt in PROMPTS[:3]]
                await until(lambda: _is_running(served, len(broken)), "the requests of one gateway run")
                answers = asyncio.gather(*(streamed(http, prompt, seed=seed) for prompt, seed in asked))
                await until(lambda: _is_running(served, len(broken) + len(asked)), "the requests of both run")
                gateways[0].send(signal.SIGKILL)
                for outcome in await asyncio.gather(*broken, return_exceptions=True):
                    assert isinstance(outcome, aiohttp.ClientError)
                for events, text in zip(await answers, expected, strict=True):
                    assert content(events) == text
                    assert events[-1] == "[DONE]"
                await until(lambda: _is_running(served, 0), "the requests of the killed gateway are gone")
                assert (await client.pool_summary()).num_active_blocks == 0
                ended = await _num_cancelled(served) - num_cancelled
                assert ended == len(broken), "they have not gone on to their end"
                assert content(await streamed(http, asked[0][0], seed=asked[0][1])) == expected[0]


@pytest.mark.timeout(600)
async def test_answers_over_http(served: Stack) -> None:
    """It runs last, because it ends the services."""
    async with aiohttp.ClientSession(f"http://{served.openai}") as http, served.client() as client:
        messages = [{"role": "user", "content": "Tell me about a cat."}]
        expected = await client.complete(messages, max_tokens=24, temperature=0)
        body = {"messages": messages, "max_tokens": 24, "temperature": 0}
        async with http.post("/v1/chat/completions", json=body) as response:
            answer = await response.json()
        assert answer["choices"][0]["message"]["content"] == expected.text
        assert answer["usage"]["prompt_tokens"] == expected.prompt_tokens
        async with http.post("/v1/completions", json={"prompt": "Once", "temperature": -1}) as response:
            assert (response.status, (await response.json())["error"]["param"]) == (400, "temperature")
        async with http.post("/v1/completions", json={"prompt": "Once", "max_tokens": 10**6}) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (400, "context_length_exceeded")

        async with http.post(
            "/v1/completions", json={"prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        ) as response:
            await response.content.readline()
        await until(lambda: _is_running(served, 0), "the blocks of the client that went away are free")
        assert await served.stop() == 0


async def _num_resumed(http: aiohttp.ClientSession) -> float:
    """Returns how many streams the gateway has continued."""
    async with http.get("/metrics") as response:
        return _value(await response.text(), "quire_gateway_resumptions_total")


async def _num_cancelled(stack: Stack) -> float:
    """Returns how many requests the scheduler has cancelled since it was started."""
    return _value((await stack.get("/metrics"))[1], "quire_requests_finished_total", 'reason="cancelled"')


def _value(metrics: str, name: str, label: str = "") -> float:
    """Returns the value of a metric, which must be on the page once, with this label."""
    (line,) = (line for line in metrics.splitlines() if line.startswith(name) and label in line)
    return float(line.rpartition(" ")[2])


def _gateway(stack: Stack) -> Process:
    """Starts `quire gateway` in front of the stack's scheduler."""
    return Process("gateway", [*QUIRE, "gateway", "--scheduler", stack.grpc, "--listen", "127.0.0.1:0"])


async def _is_healthy(http: aiohttp.ClientSession) -> bool:
    async with http.get("/health") as response:
        return response.status == 200


async def _is_running(stack: Stack, num_requests: int) -> bool:
    async with stack.client() as client:
        summary = await client.pool_summary()
    return summary.num_running + summary.num_waiting == num_requests
