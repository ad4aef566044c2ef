"""`quire serve` replaces its services under load, and no stream loses or repeats a token."""

import signal
from collections.abc import Iterator

import pytest

from tests.support.e2e.stack import Stack
from tests.support.e2e.streams import StreamGroup, Undisturbed, differences, mixed_jobs, outcomes
from tests.support.e2e.waiting import until

JOBS = mixed_jobs(32)
SERVICES = ("scheduler", "executor")


@pytest.fixture(scope="module")
def served_stack() -> Iterator[Stack]:
    with Stack(max_num_seqs=sum(job.num_sequences for job in JOBS)) as stack:
        yield stack


@pytest.fixture
def served(served_stack: Stack) -> Stack:
    served_stack.show_log()
    return served_stack


async def upgraded(stack: Stack, undisturbed: Undisturbed, *, breaks_off: bool) -> None:
    """Replaces both services under streams; checks every token, and that both run as new processes."""
    async with stack.client(wait_for_ready=True) as client:
        expected = await undisturbed.outcomes(client, JOBS)
        before = {service: stack.pid(service) for service in SERVICES}

        streams = StreamGroup(client, JOBS).start()
        await streams.until(lambda streams: streams.all_have(5))
        stack.serve.send(signal.SIGUSR2)
        assert streams.most_run
        if breaks_off:
            await until(lambda: stack.pid("executor") not in (None, before["executor"]))
            await stack.until_health("NOT_SERVING")
            await until(lambda: "draining" in stack.log())
            stack.serve.send(signal.SIGUSR2)
        assert differences(await streams.ended(), expected) == []

        for service in SERVICES:
            await until(lambda service=service: stack.pid(service) not in (None, before[service]))
        await stack.until_health("SERVING")
        assert differences(await outcomes(client, JOBS[:8]), expected[:8]) == []


async def test_an_upgrade_lets_streams_end_before_the_scheduler_is_replaced(
    served: Stack, undisturbed: Undisturbed
) -> None:
    await upgraded(served, undisturbed, breaks_off=False)


async def test_streams_that_a_hasty_upgrade_breaks_off_are_continued(served: Stack, undisturbed: Undisturbed) -> None:
    await upgraded(served, undisturbed, breaks_off=True)


@pytest.mark.exhaustive
async def test_services_that_run_separately_are_replaced_by_hand() -> None:
    """The steps of docs/operations.md: the executor first, then the scheduler, which drains for a moment only."""
    jobs = JOBS[:24]
    with Stack(apart=True, drain_timeout_s=0.2, max_num_seqs=sum(job.num_sequences for job in jobs)) as stack:
        async with stack.client() as client:
            expected = await outcomes(client, jobs)
            before = {service: stack.pid(service) for service in SERVICES}
            streams = StreamGroup(client, jobs).start()
            await streams.until(lambda streams: streams.all_have(3))
            await stack.restart_executor()
            await stack.until_health("SERVING")
            assert streams.most_run
            await stack.restart_scheduler()
            assert differences(await streams.ended(), expected) == []
            assert client.num_resumptions > 0
        for service in SERVICES:
            assert stack.pid(service) not in (None, before[service])
