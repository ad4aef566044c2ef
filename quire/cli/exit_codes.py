"""The exit codes of `quire`. In the services 0 to 3 mean the same; codes above 63 follow BSD's sysexits.h."""

from quire.errors import (
    CapacityExceededError,
    DeadlineExceededError,
    InvalidRequestError,
    PermissionDeniedError,
    QueueFullError,
    QuireError,
    UnauthenticatedError,
    UnavailableError,
)

OK = 0
FAILED = 1
USAGE = 2
ADDRESS_IN_USE = 3
UNAVAILABLE = 69
TRY_AGAIN = 75
NO_PERMISSION = 77
INTERRUPTED = 130

_BY_ERROR: dict[type[QuireError], int] = {
    InvalidRequestError: USAGE,
    CapacityExceededError: USAGE,
    UnavailableError: UNAVAILABLE,
    UnauthenticatedError: NO_PERMISSION,
    PermissionDeniedError: NO_PERMISSION,
    QueueFullError: TRY_AGAIN,
    DeadlineExceededError: TRY_AGAIN,
}


def exit_code(error: QuireError) -> int:
    """Returns the code for an error.

    USAGE: change the request. UNAVAILABLE: no server. TRY_AGAIN: it may work later. NO_PERMISSION: send
    another key. FAILED: any other error.
    """
    return _BY_ERROR.get(type(error), FAILED)
