"""The engine asks for retained blocks if they help and are right, and the core starts with them."""

from __future__ import annotations

import asyncio
from contextlib import suppress
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
