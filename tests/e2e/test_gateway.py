"""OpenAI's API in front of real services: the same text as over gRPC, also when services are killed."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import ExitStack
from typing import Any

import aiohttp
import pytest

from tests.support.e2e.process import Process
from tests.support.e2e.stack import QUIRE, Stack
from tests.support.e2e.waiting import until
from tests.support.gateway.rig import content, parsed_events

PROMPTS = [f"Once upon a time there was a {animal}" for animal in ("cat", "dog", "fox", "owl")]
NUM_TOKENS = 500
NUM_STREAMS = int(os.environ.get("NUM_STREAMS", str(len(PROMPTS))))
"""Streams that are open when a service dies."""


def served(**flags: Any) -> Stack:
    return Stack(gateway=True, gateway_listen="127.0.0.1:0", num_blocks=512, **flags)


async def streamed(http: aiohttp.ClientSession, prompt: str, **fields: Any) -> list[Any]:
    body = {"prompt": prompt, "stream": True, "max_tokens": NUM_TOKENS, "seed": 7, "ignore_eos": True} | fields
    async with http.post("/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        return parsed_events(await response.text())


@pytest.mark.timeout(600)
async def test_streams_survive_the_death_of_each_service() -> None:
    """Streams of one prompt differ by their seed, which makes each of them a text of its own."""
    asked = [(PROMPTS[i % len(PROMPTS)], 7 + i // len(PROMPTS)) for i in range(NUM_STREAMS)]
    async with served() as stack, aiohttp.ClientSession(f"http://{stack.openai}") as http, stack.client() as client:
        expected = []
        for prompt, seed in asked:
            completion = await client.complete(prompt, max_tokens=NUM_TOKENS, seed=seed, ignore_eos=True)
            expected.append(completion.text)
        undisturbed = [content(await streamed(http, prompt)) for prompt, _ in asked[: len(PROMPTS)]]
        assert undisturbed == expected[: len(PROMPTS)]
        for service in ("executor", "scheduler"):
            answers = asyncio.gather(*(streamed(http, prompt, seed=seed) for prompt, seed in asked))
            await until(lambda: _is_running(stack, NUM_STREAMS), "all requests run")
            stack.send(service, signal.SIGKILL)
            for events, text in zip(await answers, expected, strict=True):
                assert content(events) == text, service
                assert events[-1] == "[DONE]"
        async with http.get("/metrics") as response:
            assert f"quire_gateway_resumptions_total {NUM_STREAMS}.0" in (await response.text()).splitlines()


@pytest.mark.timeout(600)
async def test_streams_of_one_gateway_survive_the_death_of_another() -> None:
    """Two gateways share a scheduler. The requests of the killed one are freed, and the other one's streams go on."""
    asked = [(prompt, seed) for prompt in PROMPTS[:3] for seed in (7, 8)]
    with ExitStack() as ending:
        async with Stack(num_blocks=1024) as stack, stack.client() as client:
            expected = []
            for prompt, seed in asked:
                completion = await client.complete(prompt, max_tokens=NUM_TOKENS, seed=seed, ignore_eos=True)
                expected.append(completion.text)
            gateways = [_gateway(stack) for _ in range(2)]
            for gateway in gateways:
                ending.callback(gateway.kill)
            doomed, other = (f"http://{each.line('ready ').split('openai=')[1].strip()}" for each in gateways)
            async with aiohttp.ClientSession(doomed) as lost, aiohttp.ClientSession(other) as http:
                for session in (lost, http):
                    await until(lambda session=session: _is_healthy(session), "the gateway has found the scheduler")
                broken = [asyncio.ensure_future(streamed(lost, prompt, max_tokens=1900)) for prompt in PROMPTS[:3]]
                await until(lambda: _is_running(stack, len(broken)), "the requests of one gateway run")
                answers = asyncio.gather(*(streamed(http, prompt, seed=seed) for prompt, seed in asked))
                await until(lambda: _is_running(stack, len(broken) + len(asked)), "the requests of both run")
                gateways[0].send(signal.SIGKILL)
                for outcome in await asyncio.gather(*broken, return_exceptions=True):
                    assert isinstance(outcome, aiohttp.ClientError)
                for events, text in zip(await answers, expected, strict=True):
                    assert content(events) == text
                    assert events[-1] == "[DONE]"
                await until(lambda: _is_running(stack, 0), "the requests of the killed gateway are gone")
                assert (await client.pool_summary()).num_active_blocks == 0
                _, metrics = await stack.get("/metrics")
                ended = [line for line in metrics.splitlines() if line.startswith("quire_requests_finished_total")]
                (cancelled,) = [line for line in ended if 'reason="cancelled"' in line]
                assert cancelled.endswith(f" {len(broken)}.0"), "they have not gone on to their end"
                assert content(await streamed(http, asked[0][0], seed=asked[0][1])) == expected[0]


@pytest.mark.timeout(600)
async def test_answers_over_http() -> None:
    async with served() as stack, aiohttp.ClientSession(f"http://{stack.openai}") as http, stack.client() as client:
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
        await until(lambda: _is_running(stack, 0), "the blocks of the client that went away are free")
        assert await stack.stop() == 0


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
