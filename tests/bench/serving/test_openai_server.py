"""The client of OpenAI-compatible servers, against a scripted HTTP server."""

import sys
from typing import Any

import pytest
from aiohttp import web

from bench.load import LoadError
from bench.serving.openai_server import openai_process, openai_sender, openai_session
from bench.trace import TraceRequest

REQUEST = TraceRequest((7, 0), 3)


async def test_sender_posts_a_streaming_completion_and_counts_usage() -> None:
    bodies = []

    async def completions(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b': comment\n\ndata: {"choices": [{"text": "a"}]}\n\n')
        await response.write(b'data: {"choices": [{"text": "b"}], "usage": null}\n\n')
        usage = b'{"completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}}'
        await response.write(b'data: {"choices": [], "usage": ' + usage + b"}\n\ndata: [DONE]\n\n")
        return response

    async with serving(completions) as url, openai_session() as session:
        seen = await openai_sender(session, url + "/", "toy")(REQUEST)
    assert len(seen.arrivals_s) == 2
    assert (seen.num_output_tokens, seen.num_cached_tokens) == (3, 1)
    assert bodies == [
        {
            "model": "toy",
            "prompt": [7, 0],
            "max_tokens": 3,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


@pytest.mark.parametrize("details", ["", ', "prompt_tokens_details": null'])
async def test_cached_tokens_of_a_server_that_does_not_report_them_are_not_known(details: str) -> None:
    async def completions(request: web.Request) -> web.Response:
        event = f'{{"choices": [{{"text": "abc"}}], "usage": {{"completion_tokens": 3{details}}}}}'
        return web.Response(text=f"data: {event}\n\ndata: [DONE]\n\n", content_type="text/event-stream")

    async with serving(completions) as url, openai_session() as session:
        seen = await openai_sender(session, url, "toy")(REQUEST)
    assert seen.num_cached_tokens is None


async def test_http_error_is_a_load_error_with_the_servers_message() -> None:
    async def completions(request: web.Request) -> web.Response:
        return web.Response(status=404, text="no such model")

    async with serving(completions) as url, openai_session() as session:
        with pytest.raises(LoadError, match="404: no such model"):
            await openai_sender(session, url, "toy")(REQUEST)


async def test_unreachable_server_is_a_load_error() -> None:
    async with openai_session() as session:
        with pytest.raises(LoadError, match=r"127\.0\.0\.1:1"):
            await openai_sender(session, "http://127.0.0.1:1", "toy")(REQUEST)


class serving:  # noqa: N801 - used as a function
    """Runs an HTTP server on a free port for the time of a block and returns its URL."""

    def __init__(self, handler: Any) -> None:
        application = web.Application()
        application.router.add_post("/v1/completions", handler)
        self._runner = web.AppRunner(application)

    async def __aenter__(self) -> str:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()


async def test_command_that_ends_before_it_is_ready_is_a_load_error() -> None:
    with pytest.raises(LoadError, match="ended with status 3"):
        async with openai_process((sys.executable, "-c", "raise SystemExit(3)"), "http://127.0.0.1:1"):
            pass
