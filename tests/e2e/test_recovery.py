"""Whatever happens to the executor, or to the way to it, clients notice a pause and nothing else."""

import signal
from collections.abc import Callable, Iterator

import grpc
import pytest

from quire import AsyncClient, DeadlineExceededError, FinishReason, ServerState, UnavailableError
from quire.executor.v1 import executor_pb2
from quire.executor.v1.executor_pb2_grpc import ExecutorStub
from tests.support.e2e.process import is_running
from tests.support.e2e.proxy import Proxy
from tests.support.e2e.stack import Stack
from tests.support.e2e.streams import Crowd, Job, Outcome, differences, mixed_jobs, outcomes
from tests.support.e2e.waiting import until

NUM_STREAMS = 64
JOBS = mixed_jobs(NUM_STREAMS)
NUM_SEQS = sum(job.num_sequences for job in JOBS)


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Stack]]:
    """Of `quire serve`; the last one may still run."""
    started: list[Stack] = []
    yield started
    for stack in started:
        stack.kill()


@pytest.fixture
def served(servers: list[Stack]) -> Stack:
    """A `quire serve` that runs. A test may end it."""
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
    """Scheduler and executor with a network between them; tests leave it whole."""
    apart_stack.show_log()
    return apart_stack


@pytest.fixture
def network(apart: Stack) -> Proxy:
    assert apart.proxy is not None
    return apart.proxy


async def undisturbed(stack: Stack, client: AsyncClient) -> list[Outcome]:
    """What the jobs come to when nothing happens."""
    losses = stack.losses
    expected = await outcomes(client, JOBS)
    assert stack.losses == losses, "the executor was lost without anybody's doing"
    reasons = {output.reason for outcome in expected for output in outcome.outputs}
    assert reasons == set(FinishReason), "these jobs end in every way there is"
    return expected


async def in_mid_stream(client: AsyncClient) -> Crowd:
    """Each sequence has some tokens; on a busy machine the first may have ended before the last has begun."""
    crowd = Crowd(client, JOBS).start()
    await crowd.until(lambda crowd: crowd.all_have(5))
    return crowd


def grown(num_tokens: int) -> Callable[[Crowd], bool]:
    """So many tokens have come."""
    return lambda crowd: crowd.num_tokens >= num_tokens


async def incarnation(stack: Stack) -> str:
    """Of the executor that can be reached."""
    async with grpc.aio.insecure_channel(stack.executor_address) as channel:
        description = await ExecutorStub(channel).Describe(
            executor_pb2.DescribeRequest(), wait_for_ready=True, timeout=60
        )
        return str(description.incarnation)


async def test_streams_survive_a_killed_executor(served: Stack) -> None:
    stack = served
    async with stack.client() as client:
        expected = await undisturbed(stack, client)
        scheduler, num_losses = stack.pid("scheduler"), stack.num_losses

        crowd = await in_mid_stream(client)
        killed = stack.send("executor", signal.SIGKILL)
        assert crowd.most_run
        await stack.until_health("NOT_SERVING")
        assert await stack.readyz() == 503
        await stack.until_health("SERVING")
        assert await stack.readyz() == 200

        assert differences(await crowd.ended(), expected) == []
        assert stack.pid("executor") not in (None, killed)
        assert stack.pid("scheduler") == scheduler
        assert stack.num_losses == num_losses + 1


async def test_streams_survive_a_network_that_is_down_for_a_while(apart: Stack, network: Proxy) -> None:
    async with apart.client() as client:
        expected = await undisturbed(apart, client)
        before = await incarnation(apart)

        crowd = await in_mid_stream(client)
        network.refuse()
        assert crowd.most_run
        await apart.until_health("NOT_SERVING")
        assert await apart.readyz() == 503
        network.accept()
        await apart.until_health("SERVING")
        assert await apart.readyz() == 200

        assert differences(await crowd.ended(), expected) == []
        assert await incarnation(apart) == before


async def test_streams_survive_a_connection_cut_again_and_again(apart: Stack, network: Proxy) -> None:
    async with apart.client() as client:
        expected = await undisturbed(apart, client)
        num_losses = apart.num_losses

        crowd = await in_mid_stream(client)
        for _ in range(3):
            network.cut()
            assert crowd.num_running > 0
            await crowd.until(grown(crowd.num_tokens + 2 * NUM_STREAMS))
        network.cut()

        assert differences(await crowd.ended(), expected) == []
        assert apart.num_losses - num_losses >= 3


async def test_streams_survive_a_network_that_goes_silent(apart: Stack, network: Proxy) -> None:
    """No connection breaks, but nothing comes any more: the scheduler has to find out by itself."""
    async with apart.client() as client:
        jobs = JOBS[:16]
        expected = await outcomes(client, jobs)
        crowd = Crowd(client, jobs).start()
        await crowd.until(lambda crowd: crowd.all_have(5))
        network.stall()
        assert crowd.most_run
        await apart.until_health("NOT_SERVING")
        network.resume()
        assert differences(await crowd.ended(), expected) == []
        await apart.until_health("SERVING")


async def test_requests_wait_for_an_executor_that_comes_back(apart: Stack, network: Proxy) -> None:
    """They are taken while there is none, and wait; deadlines pass meanwhile."""
    job = Job("Once upon a time", {"temperature": 0, "max_tokens": 20})
    async with apart.client() as client:
        expected = await outcomes(client, [job])
        network.refuse()
        await apart.until_health("NOT_SERVING")
        assert (await client.server_info()).state is ServerState.WAITING_FOR_EXECUTOR
        with pytest.raises(DeadlineExceededError):
            await client.complete("Once upon a time", timeout_s=0.3)
        crowd = Crowd(client, [job]).start()

        async def waits_alone() -> bool:
            return (await client.block_map()).num_waiting == 1

        await until(waits_alone)
        assert crowd.num_tokens == 0
        network.accept()
        assert differences(await crowd.ended(), expected) == []


async def test_a_killed_scheduler_costs_the_streams_and_nothing_else(served: Stack) -> None:
    stack, jobs = served, JOBS[:8]
    async with stack.client() as client:
        expected = await outcomes(client, jobs)
        executor, before = stack.pid("executor"), await incarnation(stack)

        crowd = Crowd(client, jobs).start()
        await crowd.until(lambda crowd: crowd.all_have(5))
        stack.send("scheduler", signal.SIGKILL)
        assert {type(failure) for failure in await crowd.failures()} == {UnavailableError}
        with pytest.raises(UnavailableError):
            await client.complete("Once upon a time", max_tokens=1)

        await stack.until_health("SERVING")
        assert (stack.pid("executor"), await incarnation(stack)) == (executor, before)
        async with stack.client(wait_for_ready=True) as new_client:
            assert differences(await outcomes(new_client, jobs), expected) == []


async def test_sigterm_drains(served: Stack) -> None:
    stack, jobs = served, JOBS[:16]
    async with stack.client() as client:
        expected = await outcomes(client, jobs)
        services = [stack.pid("scheduler"), stack.pid("executor")]

        crowd = Crowd(client, jobs).start()
        await crowd.until(lambda crowd: crowd.all_have(5))
        async with stack.frozen():  # so that the streams surely outlast what follows
            stack.serve.send(signal.SIGTERM)
            await stack.until_health("NOT_SERVING")
            assert await stack.readyz() == 503
            with pytest.raises(UnavailableError, match="draining"):
                await client.complete("Once upon a time", max_tokens=1)
            assert crowd.most_run

        assert differences(await crowd.ended(), expected) == []
        assert await stack.ended(stack.serve) == 0
        assert [is_running(pid) for pid in services if pid is not None] == [False, False]
