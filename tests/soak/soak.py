"""Runs load and faults against `quire serve`, and checks that no stream differs and that nothing is left."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random

from tests.soak.clients import Clients
from tests.soak.faults import LOAD_TIMEOUT_S, STEP_TIMEOUT_S, Faults
from tests.soak.jobs import jobs
from tests.soak.report import Report, leaks, resources, tracebacks
from tests.soak.resources import Sample, keep_sampling, sample
from tests.support.e2e.block_maps import is_idle, until_map
from tests.support.e2e.proxy import Proxy
from tests.support.e2e.stack import Stack
from tests.support.e2e.streams import outcomes
from tests.support.waiting import until

_REQUEST_TIMEOUT_S = 600.0
_MAX_SAMPLES = 1000


@dataclass(frozen=True, slots=True)
class Settings:
    """The length and the kind of a soak. faults: names in `faults.NAMES`; pause_s: mean time between two of them."""

    duration_s: float
    seed: int
    faults: Sequence[str]
    pause_s: float = 10.0
    num_clients: int = 16
    num_jobs: int = 60


async def soak(settings: Settings) -> Report:
    """Starts `quire serve`, runs the soak, and ends it."""
    with Stack(
        step_timeout_s=STEP_TIMEOUT_S, load_timeout_s=LOAD_TIMEOUT_S, num_blocks=512, log_level="warning"
    ) as stack:
        proxy = Proxy(stack.grpc)
        proxy.start()
        try:
            return await _soak(stack, proxy, settings)
        finally:
            proxy.close()


async def _soak(stack: Stack, proxy: Proxy, settings: Settings) -> Report:
    random = Random(f"faults {settings.seed}")
    all_jobs = jobs(settings.num_jobs, settings.seed)
    async with stack.client() as client:
        clients = Clients(all_jobs, await outcomes(client, all_jobs), settings.seed)
        await until_map(client, is_idle)
    faults, ended, samples = Faults(stack, proxy, random), asyncio.Event(), list[Sample]()
    before, loop = sample(stack), asyncio.get_running_loop()
    num_tasks = len(asyncio.all_tasks())
    sampling = asyncio.create_task(keep_sampling(stack, samples, max(0.5, settings.duration_s / _MAX_SAMPLES)))
    running = asyncio.create_task(clients.run(proxy.address, settings.num_clients, ended, _REQUEST_TIMEOUT_S))
    started_s = loop.time()
    await faults.happen(list(settings.faults), started_s + settings.duration_s, settings.pause_s)
    ended.set()
    await running
    duration_s = loop.time() - started_s
    sampling.cancel()
    await asyncio.wait({sampling})
    with suppress(TimeoutError):  # tasks that are cancelled end a little later
        await until(lambda: len(asyncio.all_tasks()) <= num_tasks, timeout_s=10)
    num_left = len(asyncio.all_tasks()) - num_tasks
    await stack.until_health("SERVING")
    async with stack.client(wait_for_ready=True) as client:
        left = await until_map(client, is_idle)
    rows = resources(before, samples, sample(stack))
    return Report(
        seed=settings.seed,
        duration_s=duration_s,
        requests=dict(clients.counts),
        num_tokens=clients.num_tokens,
        longest_silence_s=clients.longest_silence_s,
        faults=dict(faults.counts),
        num_restarts=sum("; restarting it in" in line for line in stack.log().splitlines()),
        resources=rows,
        left={
            "running requests": len(left.sequences),
            "waiting requests": left.num_waiting,
            "active blocks": left.summary.num_active_blocks,
            "tasks": num_left,
        },
        problems=[
            *clients.failures,
            *leaks(rows),
            *tracebacks(stack.log()),
            *["tasks of the clients are left"] * (num_left > 0),
        ],
    )
