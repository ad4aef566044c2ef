"""The work of the device thread, and its outcomes."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from executor.plans.plan import Publication, StepOutput, StepPlan


class FailureKind(Enum):
    """The reason for which a stream ends early."""

    PLAN_REJECTED = "plan rejected"
    EPOCH_REFUSED = "epoch refused"
    TAKEN_OVER = "taken over"
    INTERNAL = "internal"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of a stream, with a message for the scheduler. is_fatal: the process must end."""

    kind: FailureKind
    message: str
    is_fatal: bool = False


@dataclass(frozen=True, slots=True)
class EndOfPlans:
    """The scheduler has sent its last plan, and all results have been delivered."""


Outcome = StepOutput | Failure | EndOfPlans | Publication
Deliver = Callable[[Outcome], None]


@dataclass(frozen=True, slots=True)
class Step:
    """A plan to run. arrived_ns is on the monotonic clock."""

    plan: StepPlan
    arrived_ns: int
    deliver: Deliver


@dataclass(frozen=True, slots=True)
class Begin:
    """The beginning of a lease. Its outcome are the blocks that are retained for it, once all older work has ended."""

    epoch: int
    digest_scheme: str
    deliver: Deliver


@dataclass(frozen=True, slots=True)
class Marker:
    """A point in the queue: its outcome is delivered once all work before it is done."""

    outcome: Failure | EndOfPlans
    deliver: Deliver


@dataclass(frozen=True, slots=True)
class LivenessProbe:
    """A check of both threads: the results thread calls `answered` once all work before the probe is done."""

    answered: Callable[[], None]
