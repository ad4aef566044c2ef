"""Calls that prepare a request survive the death of a scheduler, as its stream does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.gateway.rig import Rig

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
REQUESTS = [
    pytest.param("/v1/completions", {"prompt": [100, 101], "echo": True}, id="echo"),
    pytest.param("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, id="chat"),
    pytest.param("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL]}, id="tools"),
    pytest.param("/tokenize", {"prompt": "x"}, id="tokenize"),
]


@pytest.mark.parametrize(("path", "body"), REQUESTS)
async def test_a_scheduler_that_is_away_is_awaited(path: str, body: dict[str, Any]) -> None:
    async with Rig() as rig:
        assert (await rig.complete())[0] == 200
        await rig.fake.stop()
        asking = asyncio.create_task(rig.post(path, {"model": "tiny"} | body))
        await asyncio.sleep(0.3)
        assert not asking.done()
        await rig.fake.start()
        assert (await asking)[0] == 200


@pytest.mark.parametrize(("path", "body"), REQUESTS)
async def test_another_scheduler_is_asked_at_once(path: str, body: dict[str, Any]) -> None:
    async with Rig(2) as rig:
        assert (await rig.complete())[0] == 200
        await rig.fakes[0].stop()
        assert (await rig.post(path, {"model": "tiny"} | body))[0] == 200


@pytest.mark.parametrize(("path", "body"), REQUESTS)
async def test_a_scheduler_that_was_never_there_is_not_awaited(path: str, body: dict[str, Any]) -> None:
    async with Rig(scheduler="127.0.0.1:9") as rig:
        assert (await rig.post(path, {"model": "tiny"} | body))[0] == 503
