"""The simulated server: the numbers that the real one would be started with."""

from dataclasses import dataclass

from scheduler.core import BATCHING, FCFS, KV_ALLOCATIONS, Batching, KVAllocation, Policy, Scheduler, SchedulerLimits


@dataclass(frozen=True, slots=True)
class Server:
    """num_blocks             blocks of the pool, the null block included
    batching, memory       other than the default: for measurement only
    enable_prefix_caching  None: where requests share a prefix; where none do it decides nothing, and costs time
    """

    limits: SchedulerLimits
    num_blocks: int
    block_size: int = 16
    policy: Policy = FCFS
    batching: Batching = BATCHING["continuous"]
    memory: KVAllocation = KV_ALLOCATIONS["paged"]
    enable_prefix_caching: bool | None = None

    def scheduler(self, *, has_shared_prefixes: bool) -> Scheduler:
        """The shipped core, with an executor attached."""
        caches = has_shared_prefixes if self.enable_prefix_caching is None else self.enable_prefix_caching
        scheduler = Scheduler(
            self.limits,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            policy=self.policy,
            batching=self.batching,
            kv_allocation=self.memory,
            enable_prefix_caching=caches,
        )
        scheduler.executor_attached(1, self.num_blocks)
        return scheduler
