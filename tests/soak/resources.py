"""Memory, descriptors and threads of the services over time."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil

from tests.support.e2e.stack import Stack

SERVICES = ("supervisor", "scheduler", "executor")


@dataclass(frozen=True, slots=True)
class Sample:
    """One process at one time: seconds of the loop's clock, bytes, numbers of descriptors and threads."""

    time_s: float
    service: str
    pid: int
    rss: int
    num_descriptors: int
    num_threads: int


def sample(stack: Stack) -> list[Sample]:
    """Returns a sample of each service that runs."""
    now_s, samples = asyncio.get_running_loop().time(), []
    for service in SERVICES:
        pid = stack.serve.pid if service == "supervisor" else stack.pid(service)
        with suppress(psutil.NoSuchProcess):
            if pid is not None:
                process = psutil.Process(pid)
                samples.append(
                    Sample(now_s, service, pid, process.memory_info().rss, process.num_fds(), process.num_threads())
                )
    return samples


async def keep_sampling(stack: Stack, samples: list[Sample], interval_s: float) -> None:
    """Adds samples until it is cancelled."""
    while True:
        samples += sample(stack)
        await asyncio.sleep(interval_s)


def slope(samples: Sequence[Sample]) -> float:
    """Returns the growth of memory in bytes a second: the least squares over the last half of one process's life."""
    points = [(each.time_s, float(each.rss)) for each in samples[len(samples) // 2 :]]
    if len(points) < 2:
        return 0.0
    mean_s, mean_bytes = (sum(axis) / len(points) for axis in zip(*points, strict=True))
    spread = sum((time_s - mean_s) ** 2 for time_s, _ in points)
    return sum((time_s - mean_s) * (rss - mean_bytes) for time_s, rss in points) / spread if spread else 0.0


def longest_life(samples: Sequence[Sample], service: str) -> list[Sample]:
    """Returns the samples of the process of a service that ran for the longest time."""
    lives: dict[int, list[Sample]] = {}
    for each in samples:
        if each.service == service:
            lives.setdefault(each.pid, []).append(each)
    return max(lives.values(), key=len, default=[])
