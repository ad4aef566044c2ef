"""Serves the live page of a real engine with a fake executor and a real intake."""

from collections.abc import AsyncIterator

import aiohttp
import pytest

from scheduler.text.checkpoint import Checkpoint
from tests.support.live.served import Served
from tests.support.live.serving import serve_page


@pytest.fixture
async def served(checkpoint: Checkpoint) -> AsyncIterator[Served]:
    async with serve_page(checkpoint) as served:
        yield served


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session:
        yield session
