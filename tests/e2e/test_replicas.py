"""`quire serve --replicas`: one door before several schedulers and executors, each of which may die."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import aiohttp
import psutil
import pytest

from quire import AsyncClient, ServerState
from tests.support.e2e.process import Process
from tests.support.e2e.stack import QUIRE, TINY, Stack
from tests.support.e2e.streams import OPENINGS, Job, StreamGroup, Undisturbed, differences, mixed_jobs, outcomes
from tests.support.e2e.waiting import until
from tests.support.gateway.rig import content, parsed_events

if TYPE_CHECKING:
    from collections.abc import Iterator

JOBS = mixed_jobs(16)
LONG_JOBS = [Job(OPENINGS[i], {"max_tokens": 600, "ignore_eos": True, "seed": i}) for i in range(8)]


@pytest.fixture(scope="module")
def replicated_stack() -> Iterator[Stack]:
    with Stack(
        replicas=2,
        gateway=True,
        gateway_listen="127.0.0.1:0",
        max_num_seqs=sum(job.num_sequences for job in JOBS),
        num_blocks=512,
    ) as stack:
        yield stack


@pytest.fixture
def replicated(replicated_stack: Stack) -> Stack:
    replicated_stack.show_log()
    return replicated_stack


def pids(stack: Stack, service: str) -> list[int]:
    """Returns the processes of a service, in the order of their replicas."""
    found = {}
    for child in psutil.Process(stack.serve.pid).children():
        with suppress(psutil.NoSuchProcess):
            words = child.cmdline()
            if (service, "quire") in zip(words[1:], words, strict=False) and child.status() != psutil.STATUS_ZOMBIE:
                flag = "--listen" if service == "scheduler" else "--listen-address"
                found[words[words.index(flag) + 1]] = int(child.pid)
    return [found[address] for address in sorted(found)]


async def metrics(stack: Stack) -> dict[str, float]:
    """Returns the gateway's metrics by their names with labels."""
    try:
        async with aiohttp.ClientSession(f"http://{stack.openai}") as http, http.get("/metrics") as response:
            lines = (await response.text()).splitlines()
    except aiohttp.ClientError:  # the gateway is being replaced
        return {}
    return {name: float(value) for name, _, value in (x.rpartition(" ") for x in lines if not x.startswith("#"))}


async def until_watched(stack: Stack) -> None:
    async def watches_all() -> bool:
        found = await metrics(stack)
        watched = [value for name, value in found.items() if name.startswith("quire_gateway_scheduler_watched")]
        return watched == [1.0, 1.0]

    await until(watches_all, "both schedulers report to the gateway")


async def total(stack: Stack, label: str) -> float:
    """Returns the number of choices with a label."""
    found = await metrics(stack)
    return sum(
        value for name, value in found.items() if name.startswith("quire_gateway_choices_total") and label in name
    )


async def busiest(stack: Stack) -> int:
    """Returns the number of the replica that has the most streams."""
    found = await metrics(stack)
    streams = [value for name, value in found.items() if "gateway_scheduler_streams" in name]
    return streams.index(max(streams))


async def until_ready(stack: Stack) -> None:
    async def are_ready() -> bool:
        found = await metrics(stack)
        return [value for name, value in found.items() if name.startswith("quire_gateway_scheduler_ready")] == [
            1.0,
            1.0,
        ]

    await until(are_ready, "both schedulers are ready")
    await until_watched(stack)


async def streamed(stack: Stack, prompt: str, **fields: Any) -> str:
    body = {"prompt": prompt, "stream": True, "max_tokens": 40, "ignore_eos": True, "seed": 3} | fields
    async with aiohttp.ClientSession(f"http://{stack.openai}") as http:
        async with http.post("/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            return content(parsed_events(await response.text()))


@pytest.mark.timeout(600)
async def test_grpc_and_http_clients_get_the_same_text_at_one_door(replicated: Stack) -> None:
    async with replicated.client() as client:
        info = await client.server_info()
        assert info.model_name
        completion = await client.complete("Once upon a time", max_tokens=40, seed=3, ignore_eos=True)
        assert await streamed(replicated, "Once upon a time") == completion.text
        assert await replicated.health() == "SERVING"


@pytest.mark.timeout(600)
async def test_prompts_with_one_beginning_go_where_it_is_cached(replicated: Stack) -> None:
    beginning = " ".join(f"word {i}" for i in range(120))
    await until_watched(replicated)

    async def num_known() -> float:
        return sum(value for name, value in (await metrics(replicated)).items() if "gateway_known_blocks" in name)

    async with replicated.client() as client:
        before = await num_known()
        cold = await client.complete(f"{beginning} first", max_tokens=4)
        assert cold.cached_tokens == 0

        async def is_known() -> bool:
            return await num_known() >= before + cold.prompt_tokens // 16

        await until(is_known, "the blocks of the prompt are reported")
        for i in range(6):
            warm = await client.complete(f"{beginning} then {i}", max_tokens=4)
            assert warm.cached_tokens > 64, "the request went to the other replica"


@pytest.mark.timeout(600)
async def test_streams_go_on_at_the_other_replica_when_a_scheduler_dies(
    replicated: Stack, undisturbed: Undisturbed
) -> None:
    async with replicated.client(wait_for_ready=True) as client:
        expected = await undisturbed.outcomes(client, JOBS)
        streams = StreamGroup(client, JOBS).start()
        await streams.until(lambda streams: streams.all_have(5))
        victim = pids(replicated, "scheduler")[0]
        psutil.Process(victim).send_signal(signal.SIGKILL)
        assert differences(await streams.ended(), expected) == []
    await until(lambda: _is_replaced(replicated, "scheduler", victim), "the scheduler was replaced")


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
async def test_streams_go_on_at_the_other_replica_when_an_executor_dies(
    replicated: Stack, undisturbed: Undisturbed
) -> None:
    """The scheduler lives and would wait for a new executor. The gateway does not wait where another one is ready."""
    await until_ready(replicated)
    moved = await total(replicated, 'reason="moved"')
    async with replicated.client(wait_for_ready=True) as client:
        expected = await undisturbed.outcomes(client, LONG_JOBS)
        streams = StreamGroup(client, LONG_JOBS).start()
        await streams.until(lambda streams: streams.all_have(5))
        victim = pids(replicated, "executor")[await busiest(replicated)]
        psutil.Process(victim).send_signal(signal.SIGKILL)
        assert differences(await streams.ended(), expected) == []
    assert await total(replicated, 'reason="moved"') > moved
    await until(lambda: _is_replaced(replicated, "executor", victim), "the executor was replaced")


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
async def test_draining_a_replica_moves_its_streams_and_loses_no_token(
    replicated: Stack, undisturbed: Undisturbed
) -> None:
    await until_ready(replicated)
    async with replicated.client(wait_for_ready=True) as client:
        expected = await undisturbed.outcomes(client, LONG_JOBS)
        streams = StreamGroup(client, LONG_JOBS).start()
        await streams.until(lambda streams: streams.all_have(5))
        executor = replicated.executor_address.split(",")[await busiest(replicated)]
        drained = executor.replace("executor", "scheduler")
        async with AsyncClient(drained) as operator:
            await operator.drain(move_streams=True)
            assert streams.most_run, "the drain waited for the streams' ends"
            assert (await operator.server_info()).state is ServerState.DRAINING
            assert differences(await streams.ended(), expected) == []
            await operator.resume()
    await until_ready(replicated)


def _is_replaced(stack: Stack, service: str, victim: int) -> bool:
    now = pids(stack, service)
    return victim not in now and len(now) == 2


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
async def test_an_upgrade_replaces_all_replicas_in_turn_and_loses_no_token(
    replicated: Stack, undisturbed: Undisturbed
) -> None:
    await until_watched(replicated)
    before = {pid for service in ("scheduler", "executor") for pid in pids(replicated, service)}
    async with replicated.client(wait_for_ready=True) as client:
        expected = await undisturbed.outcomes(client, JOBS)
        streams = StreamGroup(client, JOBS).start()
        await streams.until(lambda streams: streams.all_have(5))
        replicated.serve.send(signal.SIGUSR2)
        assert differences(await streams.ended(), expected) == []

        def all_are_new() -> bool:
            now = {pid for service in ("scheduler", "executor") for pid in pids(replicated, service)}
            return len(now) == 4 and not now & before

        await until(all_are_new, "all four processes are new")
        await until_ready(replicated)
        assert differences(await outcomes(client, JOBS[:2]), expected[:2]) == []


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
async def test_two_gateways_give_one_service_and_one_may_die(replicated: Stack, undisturbed: Undisturbed) -> None:
    """A second gateway before the same schedulers finds what the first one has had cached, and outlives it."""
    await until_ready(replicated)
    beginning = " ".join(f"page {i}" for i in range(120))
    sockets = [each.replace("executor", "gateway") for each in replicated.executor_address.split(",")]
    schedulers = [word for socket in sockets for word in ("--scheduler", socket)]
    doors = ("--listen", "127.0.0.1:0", "--grpc-listen", "127.0.0.1:0")

    async def finds(client: AsyncClient) -> bool:
        return (await client.complete(f"{beginning} and more", max_tokens=2)).cached_tokens > 64

    async with replicated.client(wait_for_ready=True) as first:
        await first.complete(beginning, max_tokens=4)
        second = Process("gateway", [*QUIRE, "gateway", "--model", TINY, *schedulers, *doors])
        try:
            words = await asyncio.to_thread(second.line, "ready ")
            address = words.rpartition("grpc=")[2].strip()
            async with AsyncClient(address, wait_for_ready=True) as other:
                await until(lambda: finds(other), "the second gateway sends the prompt where it is cached")
                expected = await undisturbed.outcomes(first, LONG_JOBS)
                streams = StreamGroup(other, LONG_JOBS).start()
                await streams.until(lambda streams: streams.all_have(5))
                victim = replicated.send("gateway", signal.SIGKILL)
                assert differences(await streams.ended(), expected) == []
                await until(lambda: replicated.pid("gateway") not in (None, victim), "the first gateway was replaced")
            await until_ready(replicated)
            await until(lambda: finds(first), "the new process has learnt what the old one knew")
        finally:
            second.kill()
