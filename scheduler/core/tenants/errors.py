"""The error of a tenant that has reached a limit of its own."""

from scheduler.core.errors import QueueFull


class TenantLimitReached(QueueFull):
    """The tenant has reached a limit that the operator has set for it. Other schedulers have the same limit."""
