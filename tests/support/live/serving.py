"""Serves the live page of a real engine with a fake executor and a real intake."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

from scheduler.engine.engine import Engine
from scheduler.live.feed import LiveFeed
from scheduler.live.page import LivePage
from scheduler.live.plan_log import PlanLog
from scheduler.requests.generation_defaults import GenerationDefaults
from scheduler.requests.intake import Intake, ServedModel
from scheduler.servers.access import Access
from scheduler.servers.http_server import HttpServer
from scheduler.telemetry.metrics import SchedulerMetrics
from scheduler.tenants.settings import Tenants
from scheduler.text.checkpoint import Checkpoint
from scheduler.text.tokenizer import Tokenizer
from tests.support.live.served import Served
from tests.support.scheduler.engine_rig import engine_options
from tests.support.scheduler.fake_client import DESCRIPTION, FakeClient


@asynccontextmanager
async def serve_page(
    checkpoint: Checkpoint, access: Access | None = None, tenants: Tenants | None = None
) -> AsyncIterator[Served]:
    client = FakeClient(replace(DESCRIPTION, vocab_size=400, max_model_len=400, num_blocks=301))
    plans = PlanLog()
    tenants = tenants or Tenants()
    options = engine_options(terms_of=tenants.terms_of)
    engine = Engine(client, options, on_plan=lambda core, plan, duration_s: plans.planned(core, plan))
    metrics = SchedulerMetrics()
    metrics.engine = engine
    tokenizer = Tokenizer.load(checkpoint)
    model = ServedModel(tokenizer, None, GenerationDefaults.load(checkpoint))
    intake = Intake(engine, model, metrics, tenants=tenants)
    feed = LiveFeed(engine, plans, intake.client_request_id, interval_s=0.001, max_share=1)
    http = HttpServer(engine, metrics, LivePage(feed, intake), access=access)
    await http.start("127.0.0.1:0")
    running = asyncio.create_task(engine.run())
    await engine.described()
    yield Served(client, engine, intake, plans, feed, http)
    await http.stop()
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    tokenizer.close()
