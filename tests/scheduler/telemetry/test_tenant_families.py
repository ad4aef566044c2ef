"""Metrics by tenant, counted by hand, with a bounded number of labels."""

from collections.abc import Mapping

from scheduler.core import Request, Scheduler, SchedulerLimits, SequenceParams, StepResult
from scheduler.telemetry.metric_families import MetricFamilies
from scheduler.telemetry.tenant_families import MAX_TENANTS, OTHER, TenantLabels, tenant_families


def scheduler_with(*tenants: str) -> Scheduler:
    """Returns a scheduler with one slot, and a request of 5 prompt tokens for each tenant."""
    scheduler = Scheduler(SchedulerLimits(1, 64, 100), num_blocks=50, block_size=4)
    scheduler.executor_attached(1, 50)
    for number, tenant in enumerate(tenants):
        prompt = [number] * 5
        scheduler.add(Request(number, prompt, SequenceParams(max_total_tokens=20), tenant=tenant))
    return scheduler


def samples(scheduler: Scheduler, num_rejected: Mapping[str, int]) -> dict[str, dict[str, float]]:
    families = tenant_families(MetricFamilies("m"), scheduler, TenantLabels(), num_rejected)
    return {family.name: {sample.labels["tenant"]: sample.value for sample in family.samples} for family in families}


def test_each_tenant_has_its_numbers() -> None:
    scheduler = scheduler_with("a", "b", "b")
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(StepResult(plan.epoch, plan.step_id, [9]))
    assert samples(scheduler, {"b": 3}) == {
        "quire_tenant_service": {"a": 5 + 2, "b": 0},
        "quire_tenant_ahead": {"a": 7, "b": 0},
        "quire_tenant_sequences_running": {"a": 1, "b": 0},
        "quire_tenant_sequences_waiting": {"a": 0, "b": 2},
        "quire_tenant_requests_rejected": {"b": 3},
    }


def test_tenants_beyond_the_first_share_a_label() -> None:
    names = [f"t{number}" for number in range(3 * MAX_TENANTS)]
    waiting = samples(scheduler_with(*names), {})["quire_tenant_sequences_waiting"]
    assert len(waiting) == MAX_TENANTS + 1
    assert waiting[OTHER] == 2 * MAX_TENANTS


def test_names_are_printable_and_short() -> None:
    label = TenantLabels().of("a\nb" + 1000 * "x")
    assert "\n" not in label
    assert len(label) < 100
