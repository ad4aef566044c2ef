"""Limits of requests and tokens a minute, by tenant: token buckets that hold one minute's worth."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from scheduler.core import QueueFull, TenantLimitReached, Unavailable
from scheduler.tenants.settings import Tenants

MAX_BUCKETS = 4096
"""Buckets beyond this number are searched for full ones, which can be forgotten."""

MINUTE_S = 60.0


class Bucket:
    """A token bucket: `balance` grows to `capacity` within a minute. Below zero, it delays what follows."""

    __slots__ = ("balance", "capacity", "updated_s")

    def __init__(self, capacity: int, now_s: float) -> None:
        self.capacity = capacity
        self.balance = float(capacity)
        self.updated_s = now_s

    def refill(self, now_s: float) -> None:
        self.balance = min(self.capacity, self.balance + (now_s - self.updated_s) * self.capacity / MINUTE_S)
        self.updated_s = now_s

    def wait_s(self, amount: float) -> float:
        """Returns the seconds until `amount` can be taken; 0: it can be taken now. A full bucket grants any amount."""
        missing = min(amount, self.capacity) - self.balance
        return max(0.0, missing * MINUTE_S / self.capacity)


class RateLimits:
    """Refuses the requests of tenants that exceed their requests or tokens a minute."""

    def __init__(self, tenants: Tenants, clock: Callable[[], float] = time.monotonic) -> None:
        self._tenants = tenants
        self._clock = clock
        self._buckets: dict[tuple[str, str], Bucket] = {}

    def take_request(self, tenant: str) -> None:
        """Counts a request. Raises TenantLimitReached, with the time to wait, if a minute had too many."""
        self._take(tenant, "requests", 1)

    @contextmanager
    def request(self, tenant: str) -> Iterator[None]:
        """Counts a request, unless the block refuses it for now: a client or a gateway may try it again many times.

        Raises TenantLimitReached as `take_request` does.
        """
        self.take_request(tenant)
        try:
            yield
        except (QueueFull, Unavailable):
            if (bucket := self._bucket(tenant, "requests")) is not None:
                bucket.balance += 1
            raise

    def take_tokens(self, tenant: str, num_tokens: int) -> None:
        """Counts the tokens of a prompt. Raises TenantLimitReached, with the time to wait, if there were too many."""
        self._take(tenant, "tokens", num_tokens)

    def add_tokens(self, tenant: str, num_tokens: int) -> None:
        """Counts the tokens of an output, which may put later requests off; fewer than 0 are given back."""
        if (bucket := self._bucket(tenant, "tokens")) is not None:
            bucket.balance -= num_tokens

    def _take(self, tenant: str, kind: str, amount: int) -> None:
        bucket = self._bucket(tenant, kind)
        if bucket is None:
            return
        if wait_s := bucket.wait_s(amount):
            raise TenantLimitReached(f"more than {bucket.capacity} {kind} a minute", wait_s)
        bucket.balance -= amount

    def _bucket(self, tenant: str, kind: str) -> Bucket | None:
        """Returns the bucket, filled up to now; None if the tenant has no such limit."""
        settings = self._tenants.settings_of(tenant)
        capacity = settings.requests_per_minute if kind == "requests" else settings.tokens_per_minute
        if capacity is None:
            return None
        now_s = self._clock()
        bucket = self._buckets.get((tenant, kind))
        if bucket is None:
            self._forget_full(now_s)
            bucket = self._buckets[tenant, kind] = Bucket(capacity, now_s)
        bucket.refill(now_s)
        return bucket

    def _forget_full(self, now_s: float) -> None:
        if len(self._buckets) < MAX_BUCKETS:
            return
        for bucket in self._buckets.values():
            bucket.refill(now_s)
        self._buckets = {key: bucket for key, bucket in self._buckets.items() if bucket.balance < bucket.capacity}
