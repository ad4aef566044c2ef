"""Serves the live page of a real engine with a fake executor and a real intake."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import pytest

from scheduler.engine.engine import Engine
from scheduler.live.browser_safety import HEADERS
from scheduler.live.feed import LiveFeed
from scheduler.live.page import LivePage
from scheduler.live.plan_log import PlanLog
from scheduler.requests.generation_defaults import GenerationDefaults
from scheduler.requests.intake import Intake, ServedModel
from scheduler.servers.http_server import HttpServer
from scheduler.telemetry.metrics import SchedulerMetrics
from scheduler.text.checkpoint import Checkpoint
from scheduler.text.tokenizer import Tokenizer
from tests.scheduler.conftest import byte_level, checkpoint
from tests.support.scheduler.engine_rig import engine_options
from tests.support.scheduler.fake_client import DESCRIPTION, FakeClient

__all__ = ["byte_level", "checkpoint"]


@dataclass
class Served:
    """A scheduler without its gRPC server. `feed` sends frames as often as it can."""

    client: FakeClient
    engine: Engine
    intake: Intake
    plans: PlanLog
    feed: LiveFeed
    http: HttpServer

    @property
    def url(self) -> str:
        return f"http://{self.http.address}"


@pytest.fixture
async def served(checkpoint: Checkpoint) -> AsyncIterator[Served]:
    client = FakeClient(replace(DESCRIPTION, vocab_size=400, max_model_len=400, num_blocks=301))
    plans = PlanLog()
    engine = Engine(client, engine_options(), on_plan=lambda core, plan, duration_s: plans.planned(core, plan))
    metrics = SchedulerMetrics()
    metrics.engine = engine
    tokenizer = Tokenizer.load(checkpoint)
    intake = Intake(engine, ServedModel(tokenizer, None, GenerationDefaults.load(checkpoint)), metrics)
    feed = LiveFeed(engine, plans, intake.client_request_id, interval_s=0.001, max_share=1)
    http = HttpServer(engine, metrics, LivePage(feed, intake))
    await http.start("127.0.0.1:0")
    running = asyncio.create_task(engine.run())
    await engine.described()
    yield Served(client, engine, intake, plans, feed, http)
    await http.stop()
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    tokenizer.close()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session:
        yield session


def body(text: Any = "once upon a time", max_tokens: int = 20, **fields: Any) -> dict[str, Any]:
    return {"text": text, "stopping": {"max_tokens": max_tokens, "ignore_eos": True}} | fields


async def read_messages(response: aiohttp.ClientResponse) -> list[dict[str, Any]]:
    return [json.loads(line) async for line in response.content]


def has_safe_headers(response: aiohttp.ClientResponse) -> bool:
    return all(response.headers.get(name) == value for name, value in HEADERS.items())
