"""`quire serve` outlives services that die again and again."""

import os
import signal
from collections.abc import Collection

import pytest

from quire import AsyncClient
from tests.support.e2e.stack import Stack
from tests.support.e2e.streams import Job, StreamGroup, differences, outcomes
from tests.support.e2e.waiting import until

JOB = Job("Once upon a time", {"temperature": 0, "max_tokens": 1500, "ignore_eos": True})
"""It runs for seconds, so that it has not ended when a busy machine at last sends the first signal."""


async def started_stream(client: AsyncClient) -> StreamGroup:
    streams = StreamGroup(client, [JOB]).start()
    await streams.until(lambda streams: streams.all_have(3))
    return streams


async def killed_executor(stack: Stack, before: Collection[int]) -> int:
    """Kills the executor as soon as there is a process other than those before; returns its id."""
    pids: list[int | None] = []

    async def is_new() -> bool:
        pids.append(stack.pid("executor"))
        return pids[-1] not in (None, *before)

    await until(is_new)
    pid = pids[-1]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)  # a second look for it may miss it while it begins another program
    return pid


@pytest.mark.exhaustive
async def test_a_stream_is_complete_after_six_deaths_of_the_executor_in_a_row() -> None:
    """A request may lose five executors in a row while it runs (`max_losses`). Those that only load do not count."""
    with Stack() as stack:
        async with stack.client() as client:
            expected = await outcomes(client, [JOB])
            streams = await started_stream(client)
            killed: list[int] = []
            for _ in range(6):
                killed.append(await killed_executor(stack, killed))
                assert streams.num_running == 1
            assert differences(await streams.ended(), expected) == []
        assert stack.serve.return_code is None
