"""Attacks with grammars whose work is large, though each is within all limits."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import Iterator
from typing import Any

from bench.attacks.target import Target
from quire.async_client import AsyncClient
from quire.errors import QuireError

_NUM_CLIENTS = 4
_NUM_RULES = 60
_NUM_PROPERTIES = 2000
_PAUSE_S = 0.01
_WAYS: tuple[dict[str, Any], ...] = ({"temperature": 1.0}, {"beam_width": 4})


async def slow_masks(target: Target) -> None:
    """Sends ambiguous grammars: the parser has to follow thousands of ways to read the output so far.

    The mask of the first token takes some ten milliseconds, that of the fifth half a second.
    """
    await _send(target, "lark", (_ambiguous(f"x{number}") for number in itertools.count()))


async def large_schemas(target: Target) -> None:
    """Sends schemas that no request has sent before, each with thousands of properties."""
    await _send(target, "json_schema", (_large_schema(f"p{number}_") for number in itertools.count()))


def _ambiguous(name: str) -> str:
    """Returns a grammar for any text of a and b, in Lark. `name` makes it another text."""
    texts = [f'{name}y{i}: {name} "a" | "b" {name} | {name} {name}' for i in range(_NUM_RULES)]
    ways = " | ".join(f"{name} {name}y{i}" for i in range(_NUM_RULES))
    return "\n".join([f"start: {name}", f"{name}: {ways} | ", *texts])


def _large_schema(prefix: str) -> str:
    names = [f"{prefix}{i}" for i in range(_NUM_PROPERTIES)]
    properties = {name: {"type": "string", "maxLength": 20} for name in names}
    return json.dumps({"type": "object", "properties": properties, "required": names, "additionalProperties": False})


async def _send(target: Target, kind: str, grammars: Iterator[str]) -> None:
    """Sends one after the other from each client, every second one as a beam search."""
    ways = itertools.cycle(_WAYS)

    async def loop(client: AsyncClient) -> None:
        while True:
            options: dict[str, Any] = {kind: next(grammars), **next(ways)}
            with contextlib.suppress(QuireError, TimeoutError):
                async with client.generate([5, 6, 7], max_tokens=12, **options) as events:
                    async for _ in events:
                        pass
            await asyncio.sleep(_PAUSE_S)

    async with target.client() as client, asyncio.TaskGroup() as group:
        for _ in range(_NUM_CLIENTS):
            group.create_task(loop(client))
