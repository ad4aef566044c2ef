"""Tests two schedulers on one executor over real gRPC: the second waits, unless it is told to take over."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from executor.config import ExecutorConfig
from executor.plans.plan import StepOutput, StepPlan
from executor.server import Server
from scheduler.engine.engine import Engine, ServerState
from scheduler.engine.executor_client import ExecutorClient
from tests.support.executor.fake_runner import FakeRunner, loaded
from tests.support.scheduler.engine_rig import engine_options, submit
from tests.support.waiting import until

NUM_TOKENS = 40
MAX_BACKOFF_S = 0.3


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
async def scheduler_of(executor: Server, name: str, *, takes_over: bool = False) -> AsyncIterator[Engine]:
    """Yields an engine that may still be waiting for its lease."""
    client = ExecutorClient(executor.address, holder=name, takes_over=takes_over)
    engine = Engine(client, engine_options(max_backoff_s=MAX_BACKOFF_S))
    task = asyncio.create_task(engine.run())
    yield engine
    task.cancel()
    await asyncio.wait({task})
    await client.close()


def watched(engine: Engine) -> list[ServerState]:
    """Returns the list to which each change of the state is added."""
    changes: list[ServerState] = []
    engine.on_state_change(changes.append)
    return changes


@pytest.mark.parametrize("duration_s", [1.5, pytest.param(15.0, marks=pytest.mark.exhaustive)])
async def test_a_second_scheduler_does_not_disturb_the_first(executor: Server, duration_s: float) -> None:
    async with scheduler_of(executor, "the first") as first:
        await asyncio.wait_for(first.described(), 10)
        changes = watched(first)
        async with scheduler_of(executor, "the second") as second:
            await asyncio.sleep(duration_s)
            mine = submit(first, [1, 2, 3], NUM_TOKENS)
            await asyncio.wait_for(mine.done.wait(), 10)
            assert len(mine.outputs[0]) == NUM_TOKENS
            assert not second.is_ready
            assert "the executor serves another scheduler, the first" in second.readiness
        assert changes == []


async def test_the_second_scheduler_serves_when_the_first_has_ended(executor: Server) -> None:
    async with AsyncExitStack() as first:
        engine = await first.enter_async_context(scheduler_of(executor, "the first"))
        await asyncio.wait_for(engine.described(), 10)
        async with scheduler_of(executor, "the second") as second:
            await until(lambda: "the first" in second.readiness)
            await first.aclose()
            await until(lambda: second.is_ready)
            mine = submit(second, [1, 2, 3], NUM_TOKENS)
            await asyncio.wait_for(mine.done.wait(), 10)


async def test_a_takeover_ends_the_work_of_the_holder_once(executor: Server, caplog: pytest.LogCaptureFixture) -> None:
    """The old scheduler names the new one in its readiness, and goes on when the new one has ended."""
    async with scheduler_of(executor, "the old") as old:
        await asyncio.wait_for(old.described(), 10)
        mine = submit(old, [1, 2, 3], NUM_TOKENS)
        await asyncio.wait_for(mine.first_token.wait(), 10)
        async with scheduler_of(executor, "the new", takes_over=True) as new:
            await asyncio.wait_for(new.described(), 10)
            changes = watched(new)
            theirs = submit(new, [4, 5, 6], NUM_TOKENS)
            await asyncio.wait_for(theirs.done.wait(), 10)
            await until(lambda: "the executor serves another scheduler, the new" in old.readiness)
            assert (changes, len(theirs.outputs[0])) == ([], NUM_TOKENS), "the new scheduler was disturbed"
            assert not mine.done.is_set()
            assert not old.is_ready
        messages = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
        assert "another scheduler has taken the executor (the new took over)" in messages[0]

        await asyncio.wait_for(mine.done.wait(), 10)
        assert len(mine.outputs[0]) == NUM_TOKENS
        assert old.readiness == "serving"
