"""Counts by tenant, with a bounded number of labels: the tenants with the most recent tokens, and the others.

The labels are given again at intervals, by weights that decay. No series ever decreases:

    a tenant gets a label     its series start at 0; what it did before stays in `(other)`
    a tenant loses its label  its series end; what it does from then on is counted in `(other)`
"""

from collections import Counter
from collections.abc import Callable, Iterable
from heapq import nlargest

from scheduler.core import Account

MAX_TENANTS = 20
"""Tenants with a label of their own."""

MAX_WEIGHTS = 1024
"""Tenants with a weight of their own. Beyond it, a new tenant takes the place and the weight of the lightest."""

INTERVAL_S = 60.0
"""Minimum time between two distributions of the labels."""

HALF_LIFE_S = 300.0
"""Time after which a token counts half as much for a label."""

OTHER = "(other)"
"""No name of a tenant has parentheses, so no tenant shares this label by its name."""


class TenantLabels:
    """The label of each tenant: its name, or OTHER.

    A tenant without a label gets one at once while there are free ones. Otherwise the labels change in `distribute`
    only. The tenants with the largest weights are found as in Metwally et al., "Efficient Computation of Frequent and
    Top-k Elements in Data Streams", ICDT 2005 (Space-Saving).
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._distributed_s: float | None = None
        self._weights: dict[str, float] = {}
        self._labels: dict[str, None] = {}  # the tenants that have one, an ordered set

    def of(self, tenant: str) -> str:
        """Returns the label of a tenant."""
        if tenant not in self._labels:
            if len(self._labels) >= MAX_TENANTS:
                return OTHER
            self._labels[tenant] = None
        return tenant

    def weigh(self, tenant: str, num_tokens: int) -> None:
        """Adds tokens to the weight of a tenant."""
        weights = self._weights
        if tenant not in weights:
            weight = 0.0
            if len(weights) >= MAX_WEIGHTS:
                weight = weights.pop(min(weights, key=weights.__getitem__))
            weights[tenant] = weight
        weights[tenant] += num_tokens

    def distribute(self) -> set[str]:
        """Gives the labels to the tenants with the largest weights, if it is time; returns the labels that are lost."""
        now_s = self._clock()
        if self._distributed_s is None:
            self._distributed_s = now_s
        past_s = now_s - self._distributed_s
        if past_s < INTERVAL_S:
            return set()
        self._distributed_s = now_s
        decay = 0.5 ** (past_s / HALF_LIFE_S)
        self._weights = {tenant: weight * decay for tenant, weight in self._weights.items()}
        top = nlargest(MAX_TENANTS, self._weights, key=self._weights.__getitem__)
        kept = [tenant for tenant in self._labels if tenant not in top][: MAX_TENANTS - len(top)]
        before, self._labels = self._labels, dict.fromkeys((*top, *kept))
        return before.keys() - self._labels.keys()


class TenantCounts:
    """Counters by label. Used on the event loop's thread.

    num_tokens    by label, and "prompt" or "generated"
    num_rejected  requests that were never queued
    service       as the core charges it, as of the last call of `update`
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.labels = TenantLabels(clock)
        self.num_tokens: Counter[tuple[str, ...]] = Counter()
        self.num_rejected: Counter[str] = Counter()
        self.service: Counter[str] = Counter()
        self._costs: dict[Account, int] = {}  # at the last update

    def tokens(self, tenant: str, kind: str, num_tokens: int) -> None:
        """Counts tokens of a tenant."""
        self.labels.weigh(tenant, num_tokens)
        self.num_tokens[self.labels.of(tenant), kind] += num_tokens

    def rejected(self, tenant: str) -> None:
        self.num_rejected[self.labels.of(tenant)] += 1

    def update(self, accounts: Iterable[Account]) -> None:
        """Adds the service since the last update; then gives the labels again if it is time. Called for each scrape.

        A restarted core has new accounts, which start at 0.
        """
        costs = {account: account.cost for account in accounts}
        for account, cost in costs.items():
            self.service[self.labels.of(account.name)] += cost - self._costs.get(account, 0)
        self._costs = costs
        lost = self.labels.distribute()
        for label in lost:
            del self.num_rejected[label], self.service[label]
            del self.num_tokens[label, "prompt"], self.num_tokens[label, "generated"]
