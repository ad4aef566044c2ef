"""Readiness follows the executor's progress, on every surface; liveness does not; and what hangs is replaced."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire import AsyncClient
from tests.support.e2e.stack import Stack
from tests.support.e2e.streams import Crowd, Job, differences, mixed_jobs, outcomes
from tests.support.e2e.waiting import until

JOBS = mixed_jobs(16)
SHORT = Job("Once upon a time", {"temperature": 0, "max_tokens": 20})
FLAGS = {"step_timeout_s": 4.0, "max_num_seqs": sum(job.num_sequences for job in JOBS)}
"""Far more than a step takes, and less than gRPC needs to find out about a peer that stands still."""

READY = {"health": "SERVING", "health of Generation": "SERVING", "/readyz": 200, "quire_ready": 1.0}
NOT_READY = {"health": "NOT_SERVING", "health of Generation": "NOT_SERVING", "/readyz": 503, "quire_ready": 0.0}
ALIVE = {"/healthz": 200, "health of Admin": "SERVING"}


async def readiness(stack: Stack) -> dict[str, object]:
    """What the scheduler says, everywhere that it says it."""
    _, metrics = await stack.get("/metrics")
    gauges = {family.name: family for family in text_string_to_metric_families(metrics)}
    return {
        "health": await stack.health(),
        "health of Generation": await stack.health("quire.v1.Generation"),
        "/readyz": await stack.readyz(),
        "quire_ready": gauges["quire_ready"].samples[0].value,
    }


async def until_all_say(stack: Stack, expected: dict[str, object]) -> None:
    async def is_so() -> bool:
        return await readiness(stack) == expected

    await until(is_so, f"everybody says {expected}")
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
    """Of `quire serve`."""
    served_stack.show_log()
    return served_stack


@pytest.fixture(scope="module")
def apart_stack() -> Iterator[Stack]:
    with Stack(apart=True, **FLAGS) as stack:
        yield stack


@pytest.fixture
async def apart(apart_stack: Stack) -> AsyncIterator[Stack]:
    """Nobody restarts an executor here; one that a test has stopped goes on afterwards."""
    apart_stack.show_log()
    yield apart_stack
    psutil.Process(apart_stack.executor.pid).send_signal(signal.SIGCONT)


async def in_mid_stream(client: AsyncClient) -> Crowd:
    crowd = Crowd(client, JOBS).start()
    await crowd.until(lambda crowd: crowd.all_have(5))
    return crowd


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
async def test_an_executor_lost_in_mid_stream_is_replaced(served: Stack, number: signal.Signals) -> None:
    async with served.client() as client:
        expected = await outcomes(client, JOBS)
        await until_all_say(served, READY)
        crowd = await in_mid_stream(client)
        lost = served.send("executor", number)
        assert crowd.most_run
        await until_all_say(served, NOT_READY)
        await until_all_say(served, READY)
        assert differences(await crowd.ended(), expected) == []
        assert served.pid("executor") not in (None, lost)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
async def test_an_idle_executor_that_is_lost_is_replaced(served: Stack, number: signal.Signals) -> None:
    async with served.client() as client:
        expected = await outcomes(client, [SHORT])
        await until_all_say(served, READY)
        lost = served.send("executor", number)
        await until_all_say(served, NOT_READY)
        await until_all_say(served, READY)
        assert served.pid("executor") not in (None, lost)
        assert differences(await outcomes(client, [SHORT]), expected) == []


async def test_a_stopped_executor_that_goes_on_is_taken_back(apart: Stack) -> None:
    async with apart.client() as client:
        expected = await outcomes(client, JOBS)
        crowd = await in_mid_stream(client)
        apart.send("executor", signal.SIGSTOP)
        assert crowd.most_run
        await until_all_say(apart, NOT_READY)
        apart.send("executor", signal.SIGCONT)
        await until_all_say(apart, READY)
        assert differences(await crowd.ended(), expected) == []


async def test_an_idle_executor_that_stops_is_noticed_and_taken_back(apart: Stack) -> None:
    async with apart.client() as client:
        expected = await outcomes(client, [SHORT])
        apart.send("executor", signal.SIGSTOP)
        await until_all_say(apart, NOT_READY)
        waiting = asyncio.create_task(outcomes(client, [SHORT]))
        apart.send("executor", signal.SIGCONT)
        await until_all_say(apart, READY)
        assert differences(await waiting, expected) == []


async def test_a_scheduler_that_starts_anew_finds_its_executor_ready(apart: Stack) -> None:
    """The executor keeps its weights; nothing is loaded again."""
    async with apart.client() as client:
        expected = await outcomes(client, [SHORT])
    loaded, executor = apart.log().count("KV pool: "), apart.pid("executor")
    await apart.ended(apart.scheduler, signal.SIGTERM)
    apart.launch_scheduler()
    async with apart.client(wait_for_ready=True) as client:
        assert differences(await outcomes(client, [SHORT]), expected) == []
    await until_all_say(apart, READY)
    assert (apart.log().count("KV pool: "), apart.pid("executor")) == (loaded, executor)
