"""The scheduler core: a pure state machine. No clock, no I/O, no asyncio, no gRPC; the standard library only."""

from scheduler.core.batching import BATCHING, CONTINUOUS, DYNAMIC, STATIC, Batching
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
from scheduler.core.invariants import check_invariants
from scheduler.core.leap import leap
from scheduler.core.limits import Limits
from scheduler.core.memory import CONTIGUOUS, CONTIGUOUS_EXACT, CONTIGUOUS_POWER_OF_TWO, MEMORY, PAGED, Memory
from scheduler.core.plan import Admission, BeamResult, Events, Fork, Logprobs, StepPlan, StepResult, TokenLogprobs
from scheduler.core.policy import FCFS, POLICIES, PRIORITY, Policy
from scheduler.core.request import BeamParams, Request, SequenceParams
from scheduler.core.scheduler import Scheduler
from scheduler.core.sequence import TRANSITIONS, FinishReason, Sequence, State
from scheduler.core.stats import Counters
from scheduler.core.views import BlockMap, BlockRun, BlockState, KVUsage, SequenceView, block_map, kv_usage

__all__ = [
    "BATCHING",
    "CONTIGUOUS",
    "CONTIGUOUS_EXACT",
    "CONTIGUOUS_POWER_OF_TWO",
    "CONTINUOUS",
    "DYNAMIC",
    "FCFS",
    "MEMORY",
    "PAGED",
    "POLICIES",
    "PRIORITY",
    "STATIC",
    "TRANSITIONS",
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
    "KVUsage",
    "Limits",
    "Logprobs",
    "Memory",
    "PlanRejected",
    "Policy",
    "QueueFull",
    "QuireError",
    "Request",
    "ResultMismatch",
    "Scheduler",
    "Sequence",
    "SequenceParams",
    "SequenceView",
    "State",
    "StepPlan",
    "StepResult",
    "TokenLogprobs",
    "Unavailable",
    "block_map",
    "check_invariants",
    "kv_usage",
    "leap",
]
