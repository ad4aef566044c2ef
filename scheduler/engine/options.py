"""What the operator sets of the engine, and what comes of it with an executor's own limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from scheduler.core import CONTINUOUS, FCFS, PAGED, Batching, KVAllocation, Policy, Scheduler, SchedulerLimits
from scheduler.engine.model_description import ModelDescription

if TYPE_CHECKING:
    from scheduler.engine.plan_wire import ExecutorDescription


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The operator's side of the scheduler's limits; None leaves the executor's own.

    step_timeout_s     an executor that owes a result, or while idle an answer, for longer than this is given up
    describe_timeout_s how long one attempt to reach the executor may take
    max_backoff_s      longest pause between two attempts
    """

    policy: Policy = FCFS
    batching: Batching = CONTINUOUS
    memory: KVAllocation = PAGED
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_in_flight: int = 2
    max_waiting_requests: int = 4096
    max_waiting_prompt_tokens: int = 4_000_000
    enable_prefix_caching: bool = True
    step_timeout_s: float = 60.0
    describe_timeout_s: float = 5.0
    max_backoff_s: float = 2.0

    def narrowed(self, description: ExecutorDescription) -> ModelDescription:
        """What is served with this executor. Raises ExecutorNotOurs where that would be nothing."""
        return ModelDescription.narrowed(description, self.max_num_seqs, self.max_num_batched_tokens)

    def new_core(self, model: ModelDescription) -> Scheduler:
        return Scheduler(
            SchedulerLimits(
                max_num_seqs=model.max_num_seqs,
                max_num_batched_tokens=model.max_num_batched_tokens,
                max_model_len=model.max_model_len,
                max_in_flight=self.max_in_flight,
                max_waiting_requests=self.max_waiting_requests,
                max_waiting_prompt_tokens=self.max_waiting_prompt_tokens,
            ),
            num_blocks=model.num_blocks + 1,  # the null block
            block_size=model.block_size,
            policy=self.policy,
            batching=self.batching,
            kv_allocation=self.memory,
            model_name=model.model_name,
            vocab_size=model.vocab_size,
            enable_prefix_caching=self.enable_prefix_caching,
        )
