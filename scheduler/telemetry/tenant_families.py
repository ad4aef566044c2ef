"""Metric families by tenant, with the labels of `TenantCounts`."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import Metric

from scheduler.core import Scheduler
from scheduler.telemetry.metric_families import MetricFamilies
from scheduler.telemetry.tenant_counts import TenantCounts


def tenant_families(families: MetricFamilies, core: Scheduler, counts: TenantCounts) -> Iterator[Metric]:
    """Yields the families by tenant, after an update of the counts."""
    counts.update(core.state.accounts)
    labels = counts.labels
    ahead: dict[str, int] = {}
    waiting: Counter[str] = Counter()
    running: Counter[str] = Counter()
    queue = core.state.waiting
    levels = {account: account.level for account in core.state.accounts}
    least = min((level for account, level in levels.items() if len(queue.of(account))), default=None)
    for account, level in levels.items():
        label = labels.of(account.name)
        waiting[label] += len(queue.of(account))
        running[label] += 0
        gap = level - least if least is not None and account.num_requests else 0.0
        ahead[label] = max(ahead.get(label, 0), int(gap))
    for sequence in queue.paused:
        waiting[labels.of(sequence.account.name)] += 1
    for sequence in core.state.batch.running:
        running[labels.of(sequence.account.name)] += 1
    yield families.counters(
        "quire_tenant_service",
        "Service by tenant: computed prompt tokens, and generated tokens twice",
        "tenant",
        counts.service,
    )
    yield families.counters_by(
        "quire_tenant_tokens",
        "Prompt tokens, cached ones included, and generated tokens that were sent, by tenant",
        ("tenant", "kind"),
        counts.num_tokens,
    )
    yield families.gauges(
        "quire_tenant_ahead", "Service, by weight, ahead of the tenant that waits with the least", "tenant", ahead
    )
    yield families.gauges("quire_tenant_sequences_running", "Running sequences, by tenant", "tenant", running)
    yield families.gauges("quire_tenant_sequences_waiting", "Waiting sequences, by tenant", "tenant", waiting)
    yield families.counters(
        "quire_tenant_requests_rejected", "Requests that were never queued, by tenant", "tenant", counts.num_rejected
    )
