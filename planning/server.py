"""The simulated server: the parameters of its scheduler core."""

from dataclasses import dataclass

from scheduler.core import BATCHING, FCFS, KV_ALLOCATIONS, Batching, KVAllocation, Policy, Scheduler, SchedulerLimits


@dataclass(frozen=True, slots=True)
class Server:
    """The parameters of the scheduler core.

    num_blocks             blocks of the pool, including the null block
    batching, memory       values other than the defaults are for measurement only
    enable_prefix_caching  None: only if requests share prefixes; otherwise it has no effect and costs time
    """

    limits: SchedulerLimits
    num_blocks: int
    block_size: int = 16
    policy: Policy = FCFS
    batching: Batching = BATCHING["continuous"]
    memory: KVAllocation = KV_ALLOCATIONS["paged"]
    enable_prefix_caching: bool | None = None

    def scheduler(self, *, has_shared_prefixes: bool) -> Scheduler:
        """Returns the shipped scheduler core, with an executor attached."""
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
