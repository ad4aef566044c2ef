"""The exceptions of the clients: one for each status of a server, all derived from `QuireError`."""

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
    """INVALID_ARGUMENT: the request is invalid by itself or for this model.

    violations  field → problem; empty if the server named no field
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
    """OUT_OF_RANGE: prompt and max_tokens cannot fit this model or its pool, so the same request will fail again.

    A new executor with a smaller pool can cause it for a request that has been admitted.
    """

    code = "OUT_OF_RANGE"


class QueueFullError(QuireError):
    """RESOURCE_EXHAUSTED with a time to retry: the queue is full, or a limit of the caller's tenant is reached.

    retry_after_s  the delay that the server suggests before the next try
    is_of_tenant   it is a limit of the tenant, so another server of the same operator need not be tried
    """

    code = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, retry_after_s: float, *, is_of_tenant: bool = False) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.is_of_tenant = is_of_tenant


class LimitExceededError(QuireError):
    """RESOURCE_EXHAUSTED for any other reason, so the same request will fail again.

    Either a message is larger than gRPC accepts, or the client did not read the output and the server closed the
    stream.
    """

    code = "RESOURCE_EXHAUSTED"


class DeadlineExceededError(QuireError):
    """DEADLINE_EXCEEDED: `timeout_s` passed, in the queue or later."""

    code = "DEADLINE_EXCEEDED"


class RequestCancelledError(QuireError):
    """CANCELLED: the request was ended, but not by this caller."""

    code = "CANCELLED"


class UnauthenticatedError(QuireError):
    """UNAUTHENTICATED: the server wants an API key, or does not know the one that was sent."""

    code = "UNAUTHENTICATED"


class PermissionDeniedError(QuireError):
    """PERMISSION_DENIED: the server knows the caller, whose roles do not allow this call."""

    code = "PERMISSION_DENIED"


class UnavailableError(QuireError):
    """UNAVAILABLE: no server answers at the address, or the server is draining or has never had an executor.

    After a break the message says how long the client tried to continue the stream.
    """

    code = "UNAVAILABLE"


class OtherModelError(QuireError):
    """FAILED_PRECONDITION: the stream broke off, and the server that answers now has another model or other weights."""

    code = "FAILED_PRECONDITION"


class InternalError(QuireError):
    """INTERNAL: a bug in the server; or a status that the protocol does not use, which `code` names.

    Also: servers ended again and again while the request ran, which is probably the cause.
    """

    code = "INTERNAL"

    def __init__(self, message: str, code: str = "INTERNAL") -> None:
        super().__init__(message)
        self.code = code
