"""Metrics by tenant, with a bounded number of labels."""

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from quire.logs import printable
from scheduler.core import Scheduler
from scheduler.telemetry.metric_families import MetricFamilies

MAX_TENANTS = 20
"""Tenants with a label of their own: the first to be seen, so that no counter ever changes its label."""

MAX_NAME = 64
"""Maximum number of characters of a tenant's name in a label."""

OTHER = "other"


class TenantLabels:
    """The label of each tenant: its name, or OTHER."""

    def __init__(self) -> None:
        self._labels: dict[str, str] = {}

    def of(self, tenant: str) -> str:
        label = self._labels.get(tenant)
        if label is None:
            if len(self._labels) >= MAX_TENANTS:
                return OTHER
            label = self._labels[tenant] = printable(tenant[:MAX_NAME])
        return label


def tenant_families(
    families: MetricFamilies, core: Scheduler, labels: TenantLabels, num_rejected: Mapping[str, int]
) -> Iterator[Metric]:
    """Yields the families by tenant. `num_rejected` is by label."""
    service: Counter[str] = Counter()
    ahead: dict[str, int] = {}
    waiting: Counter[str] = Counter()
    running: Counter[str] = Counter()
    queue = core.state.waiting
    levels = {account: account.level for account in core.state.accounts}
    least = min((level for account, level in levels.items() if len(queue.of(account))), default=None)
    for account, level in levels.items():
        label = labels.of(account.name)
        service[label] += account.cost
        waiting[label] += len(queue.of(account))
        running[label] += 0
        gap = level - least if least is not None and account.num_requests else 0.0
        ahead[label] = max(ahead.get(label, 0), int(gap))
    for sequence in core.state.batch.running:
        running[labels.of(sequence.account.name)] += 1
    yield families.counters(
        "quire_tenant_service",
        "Service by tenant: computed prompt tokens, and generated tokens twice",
        "tenant",
        service,
    )
    yield families.gauges(
        "quire_tenant_ahead", "Service, by weight, ahead of the tenant that waits with the least", "tenant", ahead
    )
    yield families.gauges("quire_tenant_sequences_running", "Running sequences, by tenant", "tenant", running)
    yield families.gauges("quire_tenant_sequences_waiting", "Waiting sequences, by tenant", "tenant", waiting)
    yield families.counters(
        "quire_tenant_requests_rejected", "Requests that were never queued, by tenant", "tenant", dict(num_rejected)
    )
