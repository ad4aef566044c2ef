"""The same trace against another server: streaming POST /v1/completions of the OpenAI API.

Beyond the API itself the peer has to take a prompt of token ids and `ignore_eos`, as inference servers commonly do, and
to report usage at the end of the stream.
"""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from typing import Any

import aiohttp

from bench.load import LoadError, RequestRecord, Send, checked_record
from bench.trace import TraceRequest

_MAX_TOTAL_S = 1800.0
_MAX_START_S = 600.0
_MAX_STOP_S = 30.0


@contextlib.asynccontextmanager
async def peer_process(command: Sequence[str], url: str) -> AsyncIterator[int]:
    """Runs a server's command from ready to the end of the block; its process group. What it prints goes nowhere.

    It is ready when it lists its models. Raises LoadError if it ends before, or takes more than ten minutes.
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
    """Ends it with all that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _MAX_STOP_S)


def peer_session() -> aiohttp.ClientSession:
    """A session without a limit on connections: a client must never wait for another one's."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=_MAX_TOTAL_S)
    )


def peer_sender(session: aiohttp.ClientSession, url: str, model: str) -> Send:
    """`url` is the server's root, e.g. "http://127.0.0.1:8000"; `model` the name it serves the model by."""
    endpoint = url.rstrip("/") + "/v1/completions"

    async def send(request: TraceRequest) -> RequestRecord:
        body = {
            "model": model,
            "prompt": list(request.prompt_token_ids),
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        arrivals_s: list[float] = []
        num_tokens = 0
        sent_s = time.perf_counter()
        try:
            async with session.post(endpoint, json=body) as reply:
                if reply.status != 200:
                    raise LoadError(f"{endpoint} answered {reply.status}: {(await reply.text())[:500]}")
                async for event in server_sent_events(reply.content):
                    if event.get("choices"):
                        arrivals_s.append(time.perf_counter())
                    if event.get("usage"):
                        num_tokens = event["usage"]["completion_tokens"]
        except aiohttp.ClientError as error:
            raise LoadError(f"{endpoint}: {error}") from error
        return checked_record(request, sent_s, arrivals_s, num_tokens)

    return send


async def server_sent_events(lines: AsyncIterable[bytes]) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a stream of `data:` lines, up to `[DONE]`."""
    async for line in lines:
        if not line.startswith(b"data:"):
            continue
        payload = line.removeprefix(b"data:").strip()
        if payload == b"[DONE]":
            return
        yield json.loads(payload)
