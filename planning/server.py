"""The simulated server: the numbers that the real one would be started with."""

from dataclasses import dataclass
from typing import Any

from scheduler.core import FCFS, Limits, Policy, Scheduler


@dataclass(frozen=True, slots=True)
class Server:
    """num_blocks             blocks of the pool, the null block included
    enable_prefix_caching  None: where requests share a prefix; where none do it decides nothing, and costs time
    modes                  further arguments of the core, as it names them (batching, memory)
    """

    limits: Limits
    num_blocks: int
    block_size: int = 16
    policy: Policy = FCFS
    enable_prefix_caching: bool | None = None
    modes: tuple[tuple[str, Any], ...] = ()

    def scheduler(self, *, has_shared_prefixes: bool) -> Scheduler:
        """The shipped core, with an executor attached."""
        caches = has_shared_prefixes if self.enable_prefix_caching is None else self.enable_prefix_caching
        scheduler = Scheduler(
            self.limits,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            policy=self.policy,
            enable_prefix_caching=caches,
            **dict(self.modes),
        )
        scheduler.executor_attached(1, self.num_blocks)
        return scheduler
