"""The engine asks for retained blocks if they help and are right, and the core starts with them."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from quire.plan_stream import FEATURES, OPTIONAL_FEATURES
from scheduler.engine.attachment import attach
from scheduler.engine.engine import Engine
from tests.support.scheduler.engine_rig import engine_options
from tests.support.scheduler.fake_client import DESCRIPTION, FakeClient
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from scheduler.engine.options import EngineOptions
    from scheduler.engine.plan_wire import ExecutorDescription

RETAINING = replace(DESCRIPTION, features=FEATURES + OPTIONAL_FEATURES, weights_digest="abc")


async def scheme(description: ExecutorDescription, options: EngineOptions) -> object:
    client = FakeClient(description)
    attachment = await attach(client, options, None, 1, lambda: None)  # type: ignore[arg-type]
    await attachment.stream.close()
    return client.retention["digest_scheme"]


@pytest.mark.parametrize(
    ("description", "options"),
    [
        (DESCRIPTION, engine_options()),
        (RETAINING, engine_options(enable_prefix_caching=False)),
        (RETAINING, engine_options(memory="contiguous")),
    ],
    ids=["executor without the feature", "no prefix cache", "contiguous memory"],
)
async def test_no_blocks_are_retained_where_none_would_be_found(
    description: ExecutorDescription, options: EngineOptions
) -> None:
    assert await scheme(description, options) == ""


async def test_the_scheme_names_all_that_the_kv_of_a_block_depends_on() -> None:
    own = await scheme(RETAINING, engine_options())
    assert own
    assert await scheme(RETAINING, engine_options(max_num_seqs=2)) == own
    for changes in (
        {"model_name": "other"},
        {"weights_digest": "other"},
        {"dtype": "bfloat16"},
        {"block_size": 8},
        {"num_blocks": 55},
    ):
        assert await scheme(replace(RETAINING, **changes), engine_options()) != own  # type: ignore[arg-type]


async def test_a_core_that_replaces_a_wrong_one_takes_none_of_its_blocks() -> None:
    client = FakeClient()
    engine = Engine(client, engine_options())  # type: ignore[arg-type]
    running = asyncio.create_task(engine.run())
    await until(lambda: engine.is_ready)
    assert engine.core is not None
    assert not engine.core.state.must_forget
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    await engine._begin_anew(0)
    assert engine.core.state.must_forget
    engine.core.executor_attached(2, 101, [(3, b"a" * 32), (4, b"b" * 32)])
    assert not len(engine.core.state.cache.index)
    assert engine.core.state.cache.index.withdrawn


@asynccontextmanager
async def engine_with_a_cached_block(step_s: float = 0.0) -> AsyncIterator[tuple[Engine, FakeClient]]:
    """Runs an engine whose executor has retained one block and takes `step_s` for each plan."""
    client = FakeClient(RETAINING)
    client.retained, client.step_s = [(3, b"a" * 32)], step_s
    engine = Engine(client, engine_options())  # type: ignore[arg-type]
    running = asyncio.create_task(engine.run())
    try:
        await until(lambda: engine.is_ready)
        yield engine, client
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def test_a_reset_is_complete_when_the_executor_has_withdrawn_the_blocks() -> None:
    async with engine_with_a_cached_block(step_s=0.05) as (engine, client):
        assert engine.reset_prefix_cache() == 1
        assert client.stream is not None
        assert not client.stream.plans
        await engine.withdrawals.executed()
        assert engine.core is not None
        assert engine.core.num_in_flight == 0
        assert [plan.withdrawn_blocks for plan in client.stream.plans] == [[3]]
        assert engine.reset_prefix_cache() == 0
        await engine.withdrawals.executed()  # there is nothing to wait for
        assert len(client.stream.plans) == 1


async def test_a_reset_does_not_wait_for_a_lost_executor() -> None:
    async with engine_with_a_cached_block() as (engine, client):
        client.is_hanging = True
        engine.reset_prefix_cache()
        waiting = asyncio.create_task(engine.withdrawals.executed())
        await until(lambda: engine.core is not None and engine.core.num_in_flight == 1)
        assert not waiting.done()
        client.is_up = False
        client.lose()
        await asyncio.wait_for(waiting, 10)
        assert engine.core is not None
        assert engine.core.state.must_forget
