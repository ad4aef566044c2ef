"""The requests that wait at a router because all replicas are full: in fair order by tenant, and bounded.

Virtual Token Counters (Sheng et al., "Fairness in Serving LLMs", OSDI 2024), as in the core's queue: of the tenants
with the lowest priority number, the one with the least service for its weight is next, and its requests in the order
of their arrival. A tenant saves no service for later: when it comes with nothing in the line, its counter is lifted to
the smallest one of its priority in the line.
"""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter

MAX_TENANTS = 4096
"""Beyond this number, tenants without a request in the line are forgotten."""

_number = attrgetter("number")


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant, and what the operator grants it.

    weight    its part of the service, relative to the weights of other tenants; greater than 0
    priority  tenants of a lower number come first
    """

    name: str
    weight: float = 1.0
    priority: int = 0


class LineFull(Exception):
    """The line has no room for another request of this tenant."""


@dataclass(eq=False, slots=True)
class Place:
    """The place of one request.

    number  the order of arrival, which it keeps when it comes back
    cost    service that is charged when it is taken
    """

    tenant: Tenant
    number: int
    cost: float


@dataclass(eq=False, slots=True)
class _Account:
    """The requests of one tenant, and its counter: service divided by its weight."""

    tenant: Tenant
    level: float = 0.0
    places: list[Place] = field(default_factory=list)


class FairLine:
    """The line. A request that was taken comes back with `put_back` if it was refused again.

    Several may be taken at once, so each is charged at once for its prompt; `charge` is for what follows.
    """

    def __init__(self, max_places: int) -> None:
        self._max_places = max_places
        self._accounts: dict[str, _Account] = {}
        self._num_places = 0
        self._num_arrivals = 0
        self._last_levels: dict[int, float] = {}  # by priority: of the tenant that was last taken

    def __len__(self) -> int:
        return self._num_places

    def enter(self, tenant: Tenant, cost: float = 1.0) -> Place:
        """Adds a request at the end of its tenant's. Raises LineFull.

        A full line still takes requests of tenants that hold less than an equal part of it.
        """
        if self._num_places >= self._max_places:
            own = self._accounts.get(tenant.name)
            num_own = len(own.places) if own is not None else 0
            num_tenants = len(list(self._waiting()))
            if num_own >= self._max_places / (num_tenants + (num_own == 0)):
                raise LineFull
        self._num_arrivals += 1
        place = Place(tenant, self._num_arrivals, cost)
        self._add(place)
        self._accounts[tenant.name].tenant = tenant  # the operator may have changed what it grants
        return place

    def put_back(self, place: Place) -> None:
        """Adds a request at the place that it had among those of its tenant, which gets its charge back.

        The tenant is not lifted: it had this request in the line all the time, as if it had not been tried.
        """
        is_known = place.tenant.name in self._accounts
        self.charge(place.tenant, -place.cost)
        self._add(place, lifts=not is_known)

    def take(self) -> Place | None:
        """Removes and returns the next request; None if the line is empty."""
        if not self._num_places:
            return None
        account = min(self._waiting(), key=lambda each: (each.tenant.priority, each.level, each.places[0].number))
        self._last_levels[account.tenant.priority] = account.level
        self._num_places -= 1
        place = account.places.pop(0)
        self.charge(place.tenant, place.cost)
        return place

    def leave(self, place: Place) -> None:
        """Removes a request, such as that of a client that has gone. It is no error if it is not in the line."""
        account = self._accounts.get(place.tenant.name)
        if account is not None and place in account.places:
            account.places.remove(place)
            self._num_places -= 1

    def charge(self, tenant: Tenant, service: float) -> None:
        """Counts service of a tenant. One that is not known needs no counter."""
        if (account := self._accounts.get(tenant.name)) is not None:
            account.level += service / account.tenant.weight

    def _add(self, place: Place, *, lifts: bool = True) -> None:
        account = self._accounts.setdefault(place.tenant.name, _Account(place.tenant))
        if not account.places and lifts:
            priority = place.tenant.priority
            account.tenant = place.tenant  # the operator may have changed what it grants
            levels = (each.level for each in self._waiting() if each.tenant.priority == priority)
            account.level = max(account.level, min(levels, default=self._last_levels.get(priority, 0.0)))
        insort(account.places, place, key=_number)
        self._num_places += 1
        if len(self._accounts) > MAX_TENANTS:
            self._accounts = {each.tenant.name: each for each in self._waiting()}

    def _waiting(self) -> Iterator[_Account]:
        return (each for each in self._accounts.values() if each.places)
