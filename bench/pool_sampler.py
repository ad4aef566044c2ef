"""Samples the server's block pool during a run."""

import asyncio
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from quire.async_client import AsyncClient
from quire.block_map import PoolSummary


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Statistics of the block pool in a run. Ratios use only samples in which a token slot was allocated.

    mean_waste_ratio  (allocated - used) / allocated token slots, both summed over all samples
    """

    num_samples: int
    mean_waste_ratio: float
    max_waste_ratio: float
    max_active_blocks: int
    max_shared_blocks: int
    max_running: int
    max_waiting: int
    num_preemptions: int
    num_cow_copies: int


class PoolSampler:
    """Samples the pool from the entry to the exit of its async context. Afterwards `stats` has the result."""

    def __init__(self, client: AsyncClient, interval_s: float = 0.2) -> None:
        self._client = client
        self._interval_s = interval_s
        self._samples: list[PoolSummary] = []
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._samples = [await self._client.pool_summary()]
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        if error is None:
            self._samples.append(await self._client.pool_summary())

    @property
    def stats(self) -> PoolStats:
        return pool_stats(self._samples)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            self._samples.append(await self._client.pool_summary())


def pool_stats(samples: list[PoolSummary]) -> PoolStats:
    """Summarizes samples in order of time. Counters are the last sample's minus the first sample's."""
    allocated = sum(sample.num_allocated_token_slots for sample in samples)
    wasted = sum(sample.num_wasted_token_slots for sample in samples)
    ratios = [s.num_wasted_token_slots / s.num_allocated_token_slots for s in samples if s.num_allocated_token_slots]
    return PoolStats(
        num_samples=len(samples),
        mean_waste_ratio=wasted / allocated if allocated else 0.0,
        max_waste_ratio=max(ratios, default=0.0),
        max_active_blocks=max(sample.num_active_blocks for sample in samples),
        max_shared_blocks=max(sample.num_shared_blocks for sample in samples),
        max_running=max(sample.num_running for sample in samples),
        max_waiting=max(sample.num_waiting for sample in samples),
        num_preemptions=samples[-1].num_preemptions - samples[0].num_preemptions,
        num_cow_copies=samples[-1].num_cow_copies - samples[0].num_cow_copies,
    )
