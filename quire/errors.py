"""What a client call can raise. One exception for each status a server answers with, all under `QuireError`."""

from collections.abc import Mapping


class QuireError(Exception):
    """Base of all errors of this client.

    code     the gRPC status by name, e.g. "UNAVAILABLE"
    message  what the server (or the channel) said
    """

    code = "UNKNOWN"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidRequestError(QuireError):
    """INVALID_ARGUMENT: the request contradicts itself or the model.

    violations  field → what is wrong with it; may be empty where the server named no field
    """

    code = "INVALID_ARGUMENT"

    def __init__(self, message: str, violations: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.violations: dict[str, str] = dict(violations or {})

    def __str__(self) -> str:
        listed = "; ".join(f"{field}: {problem}" for field, problem in self.violations.items())
        if not listed or listed in self.message:
            return self.message
        return f"{self.message} ({listed})"


class CapacityExceededError(QuireError):
    """OUT_OF_RANGE: prompt and max_tokens can never fit this model or its pool, of which a smaller one may have come.
    Trying again is of no use."""

    code = "OUT_OF_RANGE"


class QueueFullError(QuireError):
    """RESOURCE_EXHAUSTED, with a time to try again: the queue is full.

    retry_after_s  when the server suggests to try again
    """

    code = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class LimitExceededError(QuireError):
    """RESOURCE_EXHAUSTED for any other reason: a message is larger than gRPC takes, or nobody took the output for so
    long that the server gave the stream up. The same again would end the same way."""

    code = "RESOURCE_EXHAUSTED"


class DeadlineExceededError(QuireError):
    """DEADLINE_EXCEEDED: `timeout_s` passed, in the queue or later."""

    code = "DEADLINE_EXCEEDED"


class RequestCancelledError(QuireError):
    """CANCELLED: somebody other than this caller ended the request."""

    code = "CANCELLED"


class UnavailableError(QuireError):
    """UNAVAILABLE: nobody answers at the address, the server is draining, or it has had no executor yet."""

    code = "UNAVAILABLE"


class InternalError(QuireError):
    """A bug on the other side (INTERNAL), or a status that the protocol does not know; `code` says which."""

    code = "INTERNAL"

    def __init__(self, message: str, code: str = "INTERNAL") -> None:
        super().__init__(message)
        self.code = code
