"""The simulated server: the parameters of its scheduler core."""

from dataclasses import dataclass

from scheduler.core import (
    BATCHING,
    DEFAULT_TENANT,
    FCFS,
    KV_ALLOCATIONS,
    Batching,
    KVAllocation,
    Policy,
    Scheduler,
    SchedulerLimits,
    TenantTerms,
)


@dataclass(frozen=True, slots=True)
class Server:
    """The parameters of the scheduler core.

    num_blocks             blocks of the pool, including the null block
    batching, memory       values other than the defaults are for measurement only
    enable_prefix_caching  None: only if requests share prefixes. Otherwise it costs time, and only a sequence that was
                           preempted finds blocks in the cache: its own, if no other sequence has taken them
    tenants                terms of the tenants, by the number of their source; empty: all requests are of one tenant
    """

    limits: SchedulerLimits
    num_blocks: int
    block_size: int = 16
    policy: Policy = FCFS
    batching: Batching = BATCHING["continuous"]
    memory: KVAllocation = KV_ALLOCATIONS["paged"]
    enable_prefix_caching: bool | None = None
    tenants: tuple[TenantTerms, ...] = ()

    def tenant_of(self, source: int) -> str:
        """Returns the tenant that the requests of a source belong to."""
        return f"tenant-{source}" if self.tenants else DEFAULT_TENANT

    def scheduler(self, *, has_shared_prefixes: bool) -> Scheduler:
        """Returns the shipped scheduler core, with an executor attached."""
        caches = has_shared_prefixes if self.enable_prefix_caching is None else self.enable_prefix_caching
        terms = {self.tenant_of(source): terms for source, terms in enumerate(self.tenants or (TenantTerms(),))}
        scheduler = Scheduler(
            self.limits,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            policy=self.policy,
            terms_of=terms.__getitem__,
            batching=self.batching,
            kv_allocation=self.memory,
            enable_prefix_caching=caches,
        )
        scheduler.executor_attached(1, self.num_blocks)
        return scheduler
