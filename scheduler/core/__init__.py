"""The scheduler core: a pure state machine, with no clock and no I/O, in the standard library only.

    scheduler/core/*.py         the decision kernel
    scheduler/core/beams/       beam search: the beams of a request, and which of them go on
    scheduler/core/tenants/     a tenant: its terms and its account
    scheduler/core/timing/      deadlines, and the budget of a step by what steps have cost
    scheduler/core/fairness/    the shares of tenants: accounts, the queue of all tenants, the choice of victims
    scheduler/core/baselines/   static and dynamic batching, contiguous KV allocation: for measurement only
    scheduler/core/inspect/     views, invariants, step loads, and the leap of simulators

To follow one decode, begin with six classes: Scheduler, SchedulerState, StepBuilder, StepPlan, KVCache and Sequence.
`python -m checks.concepts` lists all classes that it handles and all functions that it executes.
"""

from scheduler.core.baselines.batching import BATCHING, DYNAMIC, STATIC
from scheduler.core.baselines.contiguous import (
    CONTIGUOUS,
    CONTIGUOUS_EXACT,
    CONTIGUOUS_POWER_OF_TWO,
    KV_ALLOCATIONS,
)
from scheduler.core.counters import Counters
from scheduler.core.errors import (
    CapacityExceeded,
    ExecutorLost,
    ExecutorNotOurs,
    InvalidRequest,
    InvariantViolation,
    PlanRejected,
    QueueFull,
    QuireError,
    ResultMismatch,
    Unavailable,
)
from scheduler.core.fairness.run_time import RunTime
from scheduler.core.inspect.invariants import check_invariants
from scheduler.core.inspect.leap import leap
from scheduler.core.inspect.views import (
    BlockMap,
    BlockRun,
    BlockState,
    KVUsage,
    SequenceView,
    block_map,
    kv_usage,
    oldest_waiting_s,
)
from scheduler.core.limits import SchedulerLimits
from scheduler.core.modes import CONTINUOUS, PAGED, Batching, KVAllocation
from scheduler.core.plan import Admission, BeamResult, Events, Fork, Logprobs, StepPlan, StepResult, TokenLogprobs
from scheduler.core.policy import FCFS, POLICIES, PRIORITY, Policy
from scheduler.core.request import BeamParams, ReceivedOutput, Request, SequenceParams
from scheduler.core.scheduler import Scheduler
from scheduler.core.sequence import TRANSITIONS, FinishReason, Sequence, State
from scheduler.core.state import SchedulerState
from scheduler.core.tenants.account import DEFAULT_TENANT, Account, TenantTerms, TermsOf
from scheduler.core.tenants.errors import TenantLimitReached
from scheduler.core.timing.step_costs import StepCosts

__all__ = [
    "BATCHING",
    "CONTIGUOUS",
    "CONTIGUOUS_EXACT",
    "CONTIGUOUS_POWER_OF_TWO",
    "CONTINUOUS",
    "DEFAULT_TENANT",
    "DYNAMIC",
    "FCFS",
    "KV_ALLOCATIONS",
    "PAGED",
    "POLICIES",
    "PRIORITY",
    "STATIC",
    "TRANSITIONS",
    "Account",
    "Admission",
    "Batching",
    "BeamParams",
    "BeamResult",
    "BlockMap",
    "BlockRun",
    "BlockState",
    "CapacityExceeded",
    "Counters",
    "Events",
    "ExecutorLost",
    "ExecutorNotOurs",
    "FinishReason",
    "Fork",
    "InvalidRequest",
    "InvariantViolation",
    "KVAllocation",
    "KVUsage",
    "Logprobs",
    "PlanRejected",
    "Policy",
    "QueueFull",
    "QuireError",
    "ReceivedOutput",
    "Request",
    "ResultMismatch",
    "RunTime",
    "Scheduler",
    "SchedulerLimits",
    "SchedulerState",
    "Sequence",
    "SequenceParams",
    "SequenceView",
    "State",
    "StepCosts",
    "StepPlan",
    "StepResult",
    "TenantLimitReached",
    "TenantTerms",
    "TermsOf",
    "TokenLogprobs",
    "Unavailable",
    "block_map",
    "check_invariants",
    "kv_usage",
    "leap",
    "oldest_waiting_s",
]
