"""Says why a request ends whose client has gone: it left, or its deadline came.

A client ends its call at its own deadline, and gRPC ends it in the server at about the same time. Both are often
earlier than the core, which looks at deadlines between two steps.
"""

from __future__ import annotations

import time

from scheduler.core import FinishReason

_ROUNDING = 0.01
"""gRPC tells a server the time that is left, rounded up by up to 1 %."""
_MARGIN_S = 0.1
"""Time that a call is under way before it arrives."""


def reason_of_leaving(deadline_s: float | None, arrival_s: float) -> FinishReason:
    """Returns why an admitted request ends now. Both times are readings of time.monotonic()."""
    if deadline_s is None:
        return FinishReason.CANCELLED
    earliest_s = deadline_s - _MARGIN_S - _ROUNDING * (deadline_s - arrival_s)
    return FinishReason.DEADLINE if time.monotonic() >= earliest_s else FinishReason.CANCELLED


def code_of_leaving(deadline_s: float | None, arrival_s: float) -> str:
    """Returns the status code of a request that was not admitted yet."""
    is_late = reason_of_leaving(deadline_s, arrival_s) is FinishReason.DEADLINE
    return "deadline_exceeded" if is_late else "cancelled"
