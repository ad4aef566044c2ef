"""Remembers the tenants of clients for a short time, so that a scheduler is not asked for each request."""

from __future__ import annotations

import time
from collections import OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING

from quire.errors import DeadlineExceededError, QuireError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from gateway.routing.fair_line import Tenant

KEEP_S = 10.0
"""A key that was revoked, or given to another tenant, decides choices for this much longer, and nothing else."""

MAX_CLIENTS = 4096


class KnownTenants:
    """Tenants by the digests of their clients' credentials, which are not kept themselves."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._found: OrderedDict[bytes, tuple[float, Tenant | None]] = OrderedDict()

    async def find(self, authorization: str, ask: Callable[[str], Awaitable[Tenant]]) -> Tenant | None:
        """Returns the tenant; None if the credentials are not valid, or no scheduler tells this gateway."""
        key = blake2b(authorization.encode(), digest_size=16).digest()
        found = self._found.get(key)
        if found is not None and self._clock() - found[0] < KEEP_S:
            return found[1]
        try:
            tenant: Tenant | None = await ask(authorization)
        except (UnavailableError, DeadlineExceededError):
            return None  # this says nothing about the client
        except QuireError:
            tenant = None
        self._found[key] = (self._clock(), tenant)
        self._found.move_to_end(key)
        if len(self._found) > MAX_CLIENTS:
            self._found.popitem(last=False)
        return tenant
