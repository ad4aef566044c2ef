"""A client of OpenAI-compatible servers: streaming POST /v1/completions.

Beyond the API itself, the server has to accept prompts of token ids and `ignore_eos`, and to report usage at the end of
the stream. Inference servers commonly do.
"""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import aiohttp

from bench.load import LoadError, RequestRecord, Send, checked_record
from bench.trace import TraceRequest

_MAX_TOTAL_S = 1800.0
_MAX_START_S = 600.0
_MAX_STOP_S = 30.0


@contextlib.asynccontextmanager
async def openai_process(command: Sequence[str], url: str) -> AsyncIterator[int]:
    """Runs a server's command until the end of the block, and yields its process group when it lists its models.

    Its output is discarded. Raises LoadError if it ends before it is ready, or takes more than ten minutes.
    """
    null = asyncio.subprocess.DEVNULL
    try:
        process = await asyncio.create_subprocess_exec(*command, stdout=null, stderr=null, start_new_session=True)
    except OSError as error:
        raise LoadError(f"{command[0]}: {error.strerror}") from error
    try:
        await _until_ready(process, url.rstrip("/") + "/v1/models")
        yield process.pid
    finally:
        await _end(process)


async def _until_ready(process: asyncio.subprocess.Process, url: str) -> None:
    deadline_s = time.monotonic() + _MAX_START_S
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline_s:
            if process.returncode is not None:
                raise LoadError(f"the peer's command ended with status {process.returncode} before it was ready")
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(url, timeout=aiohttp.ClientTimeout(total=5)) as reply:
                    if reply.status == 200:
                        return
            await asyncio.sleep(0.2)
    raise LoadError(f"the peer did not answer at {url} within {_MAX_START_S:.0f} s")


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ends the whole process group: SIGTERM, then SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _MAX_STOP_S)


def openai_session() -> aiohttp.ClientSession:
    """Returns a session without a limit on connections, so that no client waits for a free one."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=_MAX_TOTAL_S)
    )


def openai_sender(session: aiohttp.ClientSession, url: str, model: str) -> Send:
    """Sends requests to the server with the root `url`, e.g. "http://127.0.0.1:8000", under its name for the model."""
    endpoint = url.rstrip("/") + "/v1/completions"

    async def send(request: TraceRequest) -> RequestRecord:
        body = {
            "model": model,
            "prompt": list(request.prompt_token_ids),
            "max_tokens": request.max_tokens,
            **request.sampling,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        arrivals_s: list[float] = []
        samples: list[int] = []
        num_tokens, num_cached = 0, None
        sent_s = time.perf_counter()
        try:
            async with session.post(endpoint, json=body) as reply:
                if reply.status != 200:
                    raise LoadError(f"{endpoint} answered {reply.status}: {(await reply.text())[:500]}")
                async for event in server_sent_events(reply.content):
                    for choice in event.get("choices") or ():
                        arrivals_s.append(time.perf_counter())
                        samples.append(choice.get("index", 0))
                    if usage := event.get("usage"):
                        num_tokens = usage["completion_tokens"]
                        num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        except aiohttp.ClientError as error:
            raise LoadError(f"{endpoint}: {error}") from error
        record = checked_record(request, sent_s, arrivals_s, num_tokens, num_cached)
        return replace(record, samples=tuple(samples))

    return send


async def server_sent_events(lines: AsyncIterable[bytes]) -> AsyncIterator[dict[str, Any]]:
    """Yields the JSON objects of a stream of `data:` lines, up to `[DONE]`."""
    async for line in lines:
        if not line.startswith(b"data:"):
            continue
        payload = line.removeprefix(b"data:").strip()
        if payload == b"[DONE]":
            return
        yield json.loads(payload)
