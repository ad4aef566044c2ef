"""If services or their network fail, or are replaced, streams pause and then continue with the same tokens."""

import signal
from collections.abc import Callable, Iterator, Sequence

import grpc
import psutil
import pytest

from quire import AsyncClient, DeadlineExceededError, FinishReason, ServerState, UnavailableError
from quire.executor.v1 import executor_pb2
from quire.executor.v1.executor_pb2_grpc import ExecutorStub
from scheduler.core import ExecutorNotOurs
from scheduler.engine.executor_client import ExecutorClient
from tests.support.e2e.process import is_running
from tests.support.e2e.proxy import Proxy
from tests.support.e2e.stack import Stack
from tests.support.e2e.streams import Job, Outcome, StreamGroup, Undisturbed, differences, mixed_jobs, outcomes
from tests.support.e2e.waiting import until

NUM_STREAMS = 32
JOBS = mixed_jobs(NUM_STREAMS)
NUM_SEQS = sum(job.num_sequences for job in JOBS)
SERVICES = ("scheduler", "executor")
DRAINING = "draining: new requests are refused"
LONG_JOBS = mixed_jobs(8, num_tokens=600)  # most still run when a busy machine gets to the disturbance


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Stack]]:
    """Yields the list of started servers, of which the last may still run; kills all at the end."""
    started: list[Stack] = []
    yield started
    for stack in started:
        stack.kill()


@pytest.fixture
def served(servers: list[Stack]) -> Stack:
    """Returns a running `quire serve`, which the test may end."""
    if not servers or servers[-1].serve.return_code is not None:
        servers.append(Stack(max_num_seqs=NUM_SEQS).start())
    servers[-1].show_log()
    return servers[-1]


@pytest.fixture(scope="module")
def apart_stack() -> Iterator[Stack]:
    with Stack(apart=True, max_num_seqs=NUM_SEQS) as stack:
        yield stack


@pytest.fixture
def apart(apart_stack: Stack) -> Stack:
    """Returns scheduler and executor with a network between them, which works again after the test."""
    apart_stack.show_log()
    return apart_stack


@pytest.fixture
def network(apart: Stack) -> Proxy:
    assert apart.proxy is not None
    return apart.proxy


async def outcomes_of_jobs(stack: Stack, client: AsyncClient, undisturbed: Undisturbed) -> list[Outcome]:
    """Returns the outcomes of the jobs without a disturbance."""
    losses = stack.losses
    expected = await undisturbed.outcomes(client, JOBS)
    assert stack.losses == losses, "the executor was lost without a disturbance"
    reasons = {output.reason for outcome in expected for output in outcome.outputs}
    assert reasons == set(FinishReason), "the jobs must end for every possible reason"
    return expected


async def started_streams(client: AsyncClient, jobs: Sequence[Job] = JOBS) -> StreamGroup:
    """Starts the jobs; returns when every sequence has some tokens or has ended, as it may on a busy machine."""
    streams = StreamGroup(client, jobs).start()
    await streams.until(lambda streams: streams.all_have(5))
    return streams


def has_tokens(num_tokens: int) -> Callable[[StreamGroup], bool]:
    """Returns a condition: the streams have received this many tokens in total."""
    return lambda streams: streams.num_tokens >= num_tokens


async def incarnation(stack: Stack) -> str:
    """Returns the incarnation of the executor that can be reached."""
    async with grpc.aio.insecure_channel(stack.executor_address) as channel:
        description = await ExecutorStub(channel).Describe(
            executor_pb2.DescribeRequest(), wait_for_ready=True, timeout=60
        )
        return str(description.incarnation)


async def test_streams_survive_a_killed_executor(served: Stack, undisturbed: Undisturbed) -> None:
    stack = served
    async with stack.client() as client:
        expected = await outcomes_of_jobs(stack, client, undisturbed)
        scheduler, num_losses = stack.pid("scheduler"), stack.num_losses

        streams = await started_streams(client)
        killed = stack.send("executor", signal.SIGKILL)
        assert streams.most_run
        await stack.until_health("NOT_SERVING")
        assert await stack.readyz() == 503
        await stack.until_health("SERVING")
        assert await stack.readyz() == 200

        assert differences(await streams.ended(), expected) == []
        assert stack.pid("executor") not in (None, killed)
        assert stack.pid("scheduler") == scheduler
        assert stack.num_losses == num_losses + 1


async def test_streams_survive_a_network_that_is_down_for_a_while(
    apart: Stack, network: Proxy, undisturbed: Undisturbed
) -> None:
    async with apart.client() as client:
        expected = await outcomes_of_jobs(apart, client, undisturbed)
        before = await incarnation(apart)

        streams = await started_streams(client)
        network.refuse()
        assert streams.most_run
        await apart.until_health("NOT_SERVING")
        assert await apart.readyz() == 503
        network.accept()
        await apart.until_health("SERVING")
        assert await apart.readyz() == 200

        assert differences(await streams.ended(), expected) == []
        assert await incarnation(apart) == before


@pytest.mark.exhaustive
async def test_streams_survive_repeated_cuts_of_the_connection(
    apart: Stack, network: Proxy, undisturbed: Undisturbed
) -> None:
    async with apart.client() as client:
        expected = await outcomes_of_jobs(apart, client, undisturbed)
        num_losses = apart.num_losses

        streams = await started_streams(client)
        for _ in range(3):
            network.cut()
            assert streams.num_running > 0
            await streams.until(has_tokens(streams.num_tokens + 2 * NUM_STREAMS))
        network.cut()

        assert differences(await streams.ended(), expected) == []
        assert apart.num_losses - num_losses >= 3


@pytest.mark.exhaustive
async def test_streams_survive_a_network_that_stalls(apart: Stack, network: Proxy, undisturbed: Undisturbed) -> None:
    """No connection breaks, but no data arrives, and the scheduler has to notice that."""
    async with apart.client() as client:
        jobs = JOBS[:16]
        expected = await undisturbed.outcomes(client, jobs)
        streams = await started_streams(client, jobs)
        network.stall()
        assert streams.most_run
        await apart.until_health("NOT_SERVING")
        network.resume()
        assert differences(await streams.ended(), expected) == []
        await apart.until_health("SERVING")


async def test_requests_wait_for_an_executor_that_comes_back(apart: Stack, network: Proxy) -> None:
    """Without an executor, requests are accepted and wait; their deadlines still apply."""
    job = Job("Once upon a time", {"temperature": 0, "max_tokens": 20})
    async with apart.client() as client:
        expected = await outcomes(client, [job])
        network.refuse()
        await apart.until_health("NOT_SERVING")
        assert (await client.server_info()).state is ServerState.WAITING_FOR_EXECUTOR
        with pytest.raises(DeadlineExceededError):
            await client.complete("Once upon a time", timeout_s=0.3)
        streams = StreamGroup(client, [job]).start()

        async def request_waits() -> bool:
            return (await client.block_map()).num_waiting == 1

        await until(request_waits)
        assert streams.num_tokens == 0
        network.accept()
        assert differences(await streams.ended(), expected) == []


async def test_a_killed_scheduler_ends_the_streams_but_not_the_executor(
    served: Stack, undisturbed: Undisturbed
) -> None:
    """The client does not resume here (test_resume.py), so that the test sees the break itself."""
    stack, jobs = served, LONG_JOBS
    async with stack.client(resume_timeout_s=0) as client:
        expected = await undisturbed.outcomes(client, jobs)
        executor, before = stack.pid("executor"), await incarnation(stack)

        streams = await started_streams(client, jobs)
        stack.send("scheduler", signal.SIGKILL)
        failures = [failure for failure in await streams.failures() if failure is not None]
        assert {type(failure) for failure in failures} == {UnavailableError}
        with pytest.raises(UnavailableError):
            await client.complete("Once upon a time", max_tokens=1)

        await stack.until_health("SERVING")
        assert (stack.pid("executor"), await incarnation(stack)) == (executor, before)
        async with stack.client(wait_for_ready=True) as new_client:
            assert differences(await outcomes(new_client, jobs[:3]), expected[:3]) == []


@pytest.mark.exhaustive
async def test_a_scheduler_that_is_stopped_loses_its_lease_to_a_waiting_one(apart: Stack, network: Proxy) -> None:
    """Its process still has the connection open, but it answers no keepalive ping."""
    holder = executor_client(apart, "the second scheduler")
    try:
        before = await holder.describe(60)
        with pytest.raises(ExecutorNotOurs, match=r"serves another scheduler, .*process"):
            await holder.open_stream(lambda: None, 1, before.incarnation, 60)
        pid = apart.send("scheduler", signal.SIGSTOP)
        try:
            await until(lambda: has_lease(holder, before.incarnation), "the waiting scheduler has the lease")
        finally:
            psutil.Process(pid).send_signal(signal.SIGCONT)
    finally:
        await holder.close()
    await apart.until_health("SERVING")


def executor_client(stack: Stack, name: str) -> ExecutorClient:
    return ExecutorClient(stack.executor_address, holder=name)


async def has_lease(client: ExecutorClient, incarnation: str) -> bool:
    try:
        stream = await client.open_stream(lambda: None, 1, incarnation, 60)
    except ExecutorNotOurs:
        return False
    await stream.close()
    return True


async def upgraded(stack: Stack, undisturbed: Undisturbed, *, breaks_off: bool) -> None:
    """Replaces both services under streams; checks every token, and that both run as new processes."""
    async with stack.client(wait_for_ready=True) as client:
        expected = await undisturbed.outcomes(client, JOBS)
        before, num_drained = {service: stack.pid(service) for service in SERVICES}, stack.log().count(DRAINING)

        streams = StreamGroup(client, JOBS).start()
        await streams.until(lambda streams: streams.all_have(5))
        stack.serve.send(signal.SIGUSR2)
        assert streams.most_run
        if breaks_off:
            await until(lambda: stack.pid("executor") not in (None, before["executor"]))
            await stack.until_health("NOT_SERVING")
            await until(lambda: stack.log().count(DRAINING) > num_drained)
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


async def test_sigterm_drains_the_server(served: Stack, undisturbed: Undisturbed) -> None:
    stack, jobs = served, LONG_JOBS
    async with stack.client(resume_timeout_s=0) as client:
        expected = await undisturbed.outcomes(client, jobs)
        await stack.until_health("SERVING")  # the test before may have killed the scheduler
        services = [stack.pid("scheduler"), stack.pid("executor")]

        streams = await started_streams(client, jobs)
        async with stack.frozen():  # so that the streams do not end before the following checks
            stack.serve.send(signal.SIGTERM)
            await stack.until_health("NOT_SERVING")
            assert await stack.readyz() == 503
            with pytest.raises(UnavailableError, match="draining"):
                await client.complete("Once upon a time", max_tokens=1)
            assert streams.most_run

        assert differences(await streams.ended(), expected) == []
        assert await stack.ended(stack.serve) == 0
        assert [is_running(pid) for pid in services if pid is not None] == [False, False]
