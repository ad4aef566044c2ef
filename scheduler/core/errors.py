"""The core's errors, by cause. `scheduler.requests.status` maps the errors that clients see to status codes."""


class QuireError(Exception):
    """The base class of all errors of Quire."""


class InvalidRequest(QuireError):
    """The request is invalid by itself or for this model. `violations` maps each field to its problem."""

    def __init__(self, violations: dict[str, str]) -> None:
        super().__init__("; ".join(f"{field}: {problem}" for field, problem in violations.items()))
        self.violations = violations


class CapacityExceeded(QuireError):
    """The request can never fit into this model's context or this pool."""


class QueueFull(QuireError):
    """The waiting queue is full; the client may try again after `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(QuireError):
    """The server accepts no requests: it is draining, or no executor has described its model yet."""


class ExecutorLost(QuireError):
    """The executor or the connection to it is gone."""


class ExecutorNotOurs(ExecutorLost):
    """An executor answers, but an operator has to act before the scheduler can use it.

    It has another model, serves another scheduler, or has no capacity.
    """


class PlanRejected(ExecutorLost):
    """The executor refused a plan, because of a bug in the scheduler or the executor. The epoch is over."""


class ResultMismatch(ExecutorLost):
    """A result does not match its plan, because of a bug in the scheduler or the executor. The epoch is over."""


class InvariantViolation(QuireError):
    """The state of the core contradicts itself: a bug in Quire."""
