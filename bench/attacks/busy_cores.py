"""Processes that only compute."""

import asyncio
import multiprocessing
import os


async def compute_on_every_core() -> None:
    """Computes until it is cancelled."""
    processes = [multiprocessing.Process(target=_compute, args=[os.getpid()]) for _ in range(os.cpu_count() or 1)]
    for process in processes:
        process.start()
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        for process in processes:
            process.kill()


def _compute(parent: int) -> None:
    """Computes until the parent has ended, also if it was killed."""
    while os.getppid() == parent:
        sum(range(100_000))
