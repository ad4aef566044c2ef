"""The operator's settings that the engine uses. Makes the core from them and from an executor's limits."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from scheduler.core import BATCHING, KV_ALLOCATIONS, PAGED, POLICIES, Batching, Scheduler, SchedulerLimits, TermsOf
from scheduler.core.tenants.account import equal_terms
from scheduler.engine.model_description import ModelDescription

if TYPE_CHECKING:
    from scheduler.engine.plan_wire import ExecutorDescription

T = TypeVar("T")

TARGET_ON_CPU_MS = 100.0
TARGET_ON_GPU_MS = 25.0
"""Default targets for the time of a step with decodes. At 100 ms a token, text comes faster than people read."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The settings of `scheduler.config.SchedulerConfig` that the engine uses, under the same names.

    Their meanings and defaults are declared there, and `from_fields` copies the values. More fields are not
    settings:

    terms_of            returns what the operator grants a tenant
    describe_timeout_s  how long one attempt to reach the executor may take
    max_backoff_s       longest pause between two attempts
    """

    policy: str
    batching: str
    batch_timeout_s: float
    memory: str
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    target_inter_token_latency_ms: float | None
    max_in_flight: int
    max_waiting_requests: int
    max_waiting_prompt_tokens: int
    enable_prefix_caching: bool
    step_timeout_s: float
    terms_of: TermsOf = equal_terms
    describe_timeout_s: float = 5.0
    max_backoff_s: float = 2.0

    def narrowed(self, description: ExecutorDescription) -> ModelDescription:
        """Returns the model as it can be served with this executor. Raises ExecutorNotOurs if it cannot be served."""
        return ModelDescription.narrowed(description, self.max_num_seqs, self.max_num_batched_tokens)

    def new_core(self, model: ModelDescription) -> Scheduler:
        return Scheduler(
            replace(
                from_fields(SchedulerLimits, self, model), target_inter_token_latency_s=self._target_ms(model) / 1e3
            ),
            num_blocks=model.num_blocks + 1,  # the null block
            block_size=model.block_size,
            terms_of=self.terms_of,
            policy=POLICIES[self.policy],
            batching=self._batching(),
            kv_allocation=KV_ALLOCATIONS[self.memory],
            model_name=model.model_name,
            vocab_size=model.vocab_size,
            enable_prefix_caching=self.enable_prefix_caching,
        )

    @property
    def keeps_prefixes(self) -> bool:
        """True if computed blocks are published for later requests, so that it helps if the executor retains them."""
        return self.enable_prefix_caching and self.memory == PAGED.name

    def _target_ms(self, model: ModelDescription) -> float:
        return self.target_inter_token_latency_ms or (TARGET_ON_CPU_MS if model.device == "cpu" else TARGET_ON_GPU_MS)

    def _batching(self) -> Batching:
        """Returns the batching mode. Only dynamic batching has a timeout; the other modes do not wait for requests."""
        batching = BATCHING[self.batching]
        return replace(batching, timeout_s=self.batch_timeout_s) if batching.timeout_s else batching


def from_fields(kind: type[T], *sources: object) -> T:
    """Makes a dataclass from the attributes of `sources` that have the names of its fields.

    If several sources have an attribute, the last one counts. A field that no source has keeps its default.
    """
    values: dict[str, Any] = {}
    for field in fields(kind):  # type: ignore[arg-type]  # a dataclass
        for source in sources:
            if hasattr(source, field.name):
                values[field.name] = getattr(source, field.name)
    return kind(**values)
