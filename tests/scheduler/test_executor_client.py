"""The scheduler's end of the plan stream, with the real executor's at the other, over gRPC."""

import asyncio
from collections import Counter
from contextlib import suppress

from executor.config import ExecutorConfig
from executor.server import Server
from scheduler.core import ExecutorLost, StepPlan
from scheduler.executor_client import ExecutorClient
from tests.executor.fake_runner import FakeRunner, loaded

NUM_STREAMS = 50
NUM_PLANS = 10


async def end_of_a_stream(client: ExecutorClient, epoch: int) -> ExecutorLost:
    """Of one whose first plan is refused while the next ones are being written."""
    has_ended = asyncio.Event()
    stream = client.open_stream(has_ended.set)
    with suppress(ExecutorLost):
        for step_id in range(1, NUM_PLANS + 1):
            await stream.send(StepPlan(epoch, step_id, retired_slots=[9]))
    await asyncio.wait_for(has_ended.wait(), 10)
    try:
        stream.take()
    except ExecutorLost as error:
        return error
    finally:
        await stream.close()
    raise AssertionError("a result of a plan that was refused")


async def test_why_a_plan_was_refused_is_known_though_the_next_ones_are_being_written() -> None:
    config = ExecutorConfig(model="unused", listen_address="127.0.0.1:0", metrics_address="", num_threads=1)
    server = Server(config, loaded(FakeRunner()))
    client = ExecutorClient(await server.start())
    try:
        ends = [await end_of_a_stream(client, epoch) for epoch in range(1, NUM_STREAMS + 1)]
    finally:
        await client.close()
        await server.stop()
    why = "PlanRejected: the executor refused a plan: step 1: retired_slots: out of range"
    assert Counter(f"{type(end).__name__}: {end}" for end in ends) == {why: NUM_STREAMS}
