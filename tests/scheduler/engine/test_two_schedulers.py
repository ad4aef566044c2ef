"""Tests two schedulers on one executor over real gRPC: the second takes it over at once, and the first then pauses."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from executor.config import ExecutorConfig
from executor.plans.plan import StepOutput, StepPlan
from executor.server import Server
from scheduler.engine.engine import Engine, ServerState
from scheduler.engine.executor_client import ExecutorClient
from tests.support.executor.fake_runner import FakeRunner, loaded
from tests.support.scheduler.engine_rig import running_engine, submit

NUM_TOKENS = 40
MAX_BACKOFF_S = 1.5


class SlowRunner(FakeRunner):
    """Takes a fifth of a second for 40 tokens: a scheduler that does not pause would be back before they are done."""

    def execute(self, plan: StepPlan, computing: Callable[[], None] = lambda: None) -> StepOutput:
        time.sleep(0.005)
        return super().execute(plan, computing)


@pytest.fixture
async def executor() -> AsyncIterator[Server]:
    config = ExecutorConfig(model="unused", listen_address="127.0.0.1:0", metrics_address="", num_threads=1)
    server = Server(config, loaded(SlowRunner()))
    server.address = await server.start()
    yield server
    await server.stop()


@asynccontextmanager
async def scheduler_of(executor: Server) -> AsyncIterator[Engine]:
    client = ExecutorClient(executor.address)
    async with running_engine(client, max_backoff_s=MAX_BACKOFF_S) as engine:
        yield engine
    await client.close()


async def test_a_scheduler_that_loses_its_executor_to_another_reports_it_and_pauses(
    executor: Server, caplog: pytest.LogCaptureFixture
) -> None:
    async with scheduler_of(executor) as old:
        mine = submit(old, [1, 2, 3], NUM_TOKENS)
        await asyncio.wait_for(mine.first_token.wait(), 10)
        async with scheduler_of(executor) as new:
            new_states: list[ServerState] = []
            new.on_state_change(new_states.append)
            taken_s = time.monotonic()
            theirs = submit(new, [4, 5, 6], NUM_TOKENS)
            await asyncio.wait_for(theirs.done.wait(), 10)
            assert (new_states, len(theirs.outputs[0])) == ([], NUM_TOKENS), "the new scheduler was disturbed"
            assert not mine.done.is_set()
            assert not old.is_ready
            assert "another scheduler" in old.readiness
        errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
        assert ["another scheduler" in record.getMessage() for record in errors] == [True]

        await asyncio.wait_for(mine.done.wait(), 10)
        assert time.monotonic() - taken_s > MAX_BACKOFF_S
        assert len(mine.outputs[0]) == NUM_TOKENS
        assert old.readiness == "serving"
