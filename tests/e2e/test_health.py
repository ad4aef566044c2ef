"""Readiness follows the executor's progress on every interface, liveness does not, and hung services are replaced."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire import AsyncClient, UnavailableError
from tests.support.e2e.stack import Stack
from tests.support.e2e.streams import Job, StreamGroup, Undisturbed, differences, mixed_jobs, outcomes
from tests.support.e2e.waiting import until

JOBS = mixed_jobs(16)
SHORT = Job("Once upon a time", {"temperature": 0, "max_tokens": 20})
LONG = Job("Once upon a time", {"temperature": 0, "max_tokens": 1500, "ignore_eos": True})
"""It runs for seconds, so that it has not ended when a busy machine at last sends the signal."""
FLAGS = {"step_timeout_s": 4.0, "max_num_seqs": sum(job.num_sequences for job in JOBS)}
"""The timeout is much longer than a step, and shorter than gRPC takes to notice that a peer hangs."""

KILLED = "scheduler has not served for 4 s: killed"
READY = {"health": "SERVING", "health of Generation": "SERVING", "/readyz": 200, "quire_ready": 1.0}
NOT_READY = {"health": "NOT_SERVING", "health of Generation": "NOT_SERVING", "/readyz": 503, "quire_ready": 0.0}
ALIVE = {"/healthz": 200, "health of Admin": "SERVING"}


async def readiness(stack: Stack) -> dict[str, object]:
    """Returns the scheduler's readiness from every interface that reports it."""
    _, metrics = await stack.get("/metrics")
    gauges = {family.name: family for family in text_string_to_metric_families(metrics)}
    return {
        "health": await stack.health(),
        "health of Generation": await stack.health("quire.v1.Generation"),
        "/readyz": await stack.readyz(),
        "quire_ready": gauges["quire_ready"].samples[0].value,
    }


async def until_readiness(stack: Stack, expected: dict[str, object]) -> None:
    """Waits until every interface reports the expected readiness; checks that the scheduler is alive."""

    async def is_reported() -> bool:
        return await readiness(stack) == expected

    await until(is_reported, f"readiness is {expected}")
    assert {
        "/healthz": (await stack.get("/healthz"))[0],
        "health of Admin": await stack.health("quire.v1.Admin"),
    } == ALIVE


@pytest.fixture(scope="module")
def served_stack() -> Iterator[Stack]:
    with Stack(**FLAGS) as stack:
        yield stack


@pytest.fixture
def served(served_stack: Stack) -> Stack:
    """Returns a running `quire serve`."""
    served_stack.show_log()
    return served_stack


@pytest.fixture(scope="module")
def apart_stack() -> Iterator[Stack]:
    with Stack(apart=True, **FLAGS) as stack:
        yield stack


@pytest.fixture
async def apart(apart_stack: Stack) -> AsyncIterator[Stack]:
    """Yields separate services, without a supervisor; an executor that a test has stopped continues afterwards."""
    apart_stack.show_log()
    yield apart_stack
    psutil.Process(apart_stack.executor.pid).send_signal(signal.SIGCONT)


async def started_streams(client: AsyncClient) -> StreamGroup:
    """Starts all jobs; returns when every sequence has some tokens."""
    streams = StreamGroup(client, JOBS).start()
    await streams.until(lambda streams: streams.all_have(5))
    return streams


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
async def test_an_executor_lost_during_streams_is_replaced(
    served: Stack, undisturbed: Undisturbed, number: signal.Signals
) -> None:
    async with served.client() as client:
        expected = await undisturbed.outcomes(client, JOBS)
        await until_readiness(served, READY)
        streams = await started_streams(client)
        lost = served.send("executor", number)
        assert streams.most_run
        await until_readiness(served, NOT_READY)
        await until_readiness(served, READY)
        assert differences(await streams.ended(), expected) == []
        assert served.pid("executor") not in (None, lost)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGSTOP, marks=pytest.mark.exhaustive), signal.SIGKILL])
async def test_an_idle_executor_that_is_lost_is_replaced(served: Stack, number: signal.Signals) -> None:
    async with served.client() as client:
        expected = await outcomes(client, [SHORT])
        await until_readiness(served, READY)
        lost = served.send("executor", number)
        await until_readiness(served, NOT_READY)
        await until_readiness(served, READY)
        assert served.pid("executor") not in (None, lost)
        assert differences(await outcomes(client, [SHORT]), expected) == []


async def test_a_scheduler_that_is_stopped_is_replaced(served: Stack) -> None:
    async with served.client(resume_timeout_s=0) as client:
        streams = StreamGroup(client, [LONG]).start()
        await streams.until(lambda streams: streams.all_have(3))
        num_killed = served.log().count(KILLED)
        stopped = served.send("scheduler", signal.SIGSTOP)
        assert {type(failure) for failure in await streams.failures()} == {UnavailableError}
        await until(lambda: served.pid("scheduler") not in (None, stopped))
        await served.until_health("SERVING")
        assert (await client.complete("Once upon a time", max_tokens=3)).text
    assert served.log().count(KILLED) == num_killed + 1


async def test_a_stopped_executor_that_continues_is_used_again(apart: Stack, undisturbed: Undisturbed) -> None:
    async with apart.client() as client:
        expected = await undisturbed.outcomes(client, JOBS)
        streams = await started_streams(client)
        apart.send("executor", signal.SIGSTOP)
        assert streams.most_run
        await until_readiness(apart, NOT_READY)
        apart.send("executor", signal.SIGCONT)
        await until_readiness(apart, READY)
        assert differences(await streams.ended(), expected) == []


async def test_a_stopped_idle_executor_is_detected_and_used_again_later(apart: Stack) -> None:
    async with apart.client() as client:
        expected = await outcomes(client, [SHORT])
        apart.send("executor", signal.SIGSTOP)
        await until_readiness(apart, NOT_READY)
        waiting = asyncio.create_task(outcomes(client, [SHORT]))
        apart.send("executor", signal.SIGCONT)
        await until_readiness(apart, READY)
        assert differences(await waiting, expected) == []


async def test_a_restarted_scheduler_finds_its_executor_ready(apart: Stack) -> None:
    """The executor keeps its weights and loads nothing again."""
    async with apart.client() as client:
        expected = await outcomes(client, [SHORT])
    loaded, executor = apart.log().count("KV pool: "), apart.pid("executor")
    await apart.restart_scheduler()
    await until_readiness(apart, READY)
    async with apart.client() as client:
        assert differences(await outcomes(client, [SHORT]), expected) == []
    assert (apart.log().count("KV pool: "), apart.pid("executor")) == (loaded, executor)
