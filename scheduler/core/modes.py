"""The two seams of the scheduler: which sequence is admitted next, and where a sequence's blocks come from.

The defaults are here. The modes that exist only for comparison are in scheduler/core/baselines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from scheduler.core.kv_cache import KVCache

if TYPE_CHECKING:
    from collections.abc import Callable

    from scheduler.core.limits import SchedulerLimits
    from scheduler.core.state import SchedulerState
    from scheduler.core.waiting_queue import AdmissionQueue


@dataclass(frozen=True, slots=True)
class Batching:
    """A batching mode. `timeout_s` bounds the wait for a full batch; 0 for modes that do not wait."""

    name: str
    build_queue: Callable[[float, SchedulerState], AdmissionQueue]
    timeout_s: float = 0.0


@dataclass(frozen=True, slots=True)
class KVAllocation:
    """A way to allocate KV blocks.

    `build_cache` takes the limits, block_size, the namespace of prefixes, enable_prefix_caching and num_blocks, and
    returns the cache of one epoch.
    """

    name: str
    build_cache: Callable[[SchedulerLimits, int, str, bool, int], KVCache]


def _paged_cache(
    limits: SchedulerLimits, block_size: int, namespace: str, enable_prefix_caching: bool, num_blocks: int
) -> KVCache:
    return KVCache(num_blocks, block_size, namespace, enable_prefix_caching, limits.watermark_ratio)


CONTINUOUS = Batching("continuous", lambda timeout_s, state: state.waiting)
"""Admits the first sequence in the queue as soon as there is room (Yu et al., Orca, OSDI 2022)."""

PAGED = KVAllocation("paged", _paged_cache)
"""Allocates any free block when a token needs one (Kwon et al., SOSP 2023)."""
