"""Defines the core's errors, by blame. `scheduler.requests.status` maps those that clients see to status codes."""


class QuireError(Exception):
    """The base class of all errors of Quire."""


class InvalidRequest(QuireError):
    """The request contradicts itself or the model. `violations` maps each field to what is wrong with it."""

    def __init__(self, violations: dict[str, str]) -> None:
        super().__init__("; ".join(f"{field}: {problem}" for field, problem in violations.items()))
        self.violations = violations


class CapacityExceeded(QuireError):
    """The request can never fit this model or this pool."""


class QueueFull(QuireError):
    """The waiting queue is at its bound; try again after `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(QuireError):
    """The server takes no new work: it is draining, or does not know yet what it serves."""


class ExecutorLost(QuireError):
    """The executor or the connection to it is gone."""


class ExecutorNotOurs(ExecutorLost):
    """An executor answers, but an operator has to act before it can be used.

    It has another model, serves another scheduler, or has no capacity.
    """


class PlanRejected(ExecutorLost):
    """The executor refused a plan: a bug in one of the two. The epoch is over."""


class ResultMismatch(ExecutorLost):
    """A result does not fit the plan it should answer: a bug in one of the two. The epoch is over."""


class InvariantViolation(QuireError):
    """The state of the core contradicts itself: a bug in Quire."""
