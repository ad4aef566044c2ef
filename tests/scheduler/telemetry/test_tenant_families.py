"""Metrics by tenant, counted by hand, with a bounded number of labels."""

from itertools import pairwise
from random import Random

import pytest

from scheduler.core import Account, Request, Scheduler, SchedulerLimits, SequenceParams, StepResult
from scheduler.identity.identity import is_name
from scheduler.telemetry import tenant_counts
from scheduler.telemetry.metric_families import MetricFamilies
from scheduler.telemetry.tenant_counts import INTERVAL_S, MAX_TENANTS, MAX_WEIGHTS, OTHER, TenantCounts, TenantLabels
from scheduler.telemetry.tenant_families import tenant_families


class Clock:
    """A clock that tests set."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def scheduler_with(*tenants: str) -> Scheduler:
    """Returns a scheduler with one slot, and a request of 5 prompt tokens for each tenant."""
    scheduler = Scheduler(SchedulerLimits(1, 64, 100), num_blocks=50, block_size=4)
    scheduler.executor_attached(1, 50)
    for number, tenant in enumerate(tenants):
        prompt = [number] * 5
        scheduler.add(Request(number, prompt, SequenceParams(max_total_tokens=20), tenant=tenant))
    return scheduler


def samples(scheduler: Scheduler, counts: TenantCounts) -> dict[str, dict[str, float]]:
    families = tenant_families(MetricFamilies("m"), scheduler, counts)
    return {
        family.name: {
            " ".join(value for name, value in sample.labels.items() if name != "model_name"): sample.value
            for sample in family.samples
        }
        for family in families
    }


def test_each_tenant_has_its_numbers() -> None:
    scheduler, counts = scheduler_with("a", "b", "b"), TenantCounts(Clock())
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(StepResult(plan.epoch, plan.step_id, [9]))
    counts.tokens("a", "prompt", 5)
    counts.tokens("a", "generated", 1)
    for _ in range(3):
        counts.rejected("b")
    assert samples(scheduler, counts) == {
        "quire_tenant_service": {"a": 5 + 2, "b": 0},
        "quire_tenant_tokens": {"a prompt": 5, "a generated": 1},
        "quire_tenant_ahead": {"a": 7, "b": 0},
        "quire_tenant_sequences_running": {"a": 1, "b": 0},
        "quire_tenant_sequences_waiting": {"a": 0, "b": 2},
        "quire_tenant_requests_rejected": {"b": 3},
    }


def test_tenants_beyond_the_first_share_a_label() -> None:
    names = [f"t{number}" for number in range(3 * MAX_TENANTS)]
    waiting = samples(scheduler_with(*names), TenantCounts(Clock()))["quire_tenant_sequences_waiting"]
    assert len(waiting) == MAX_TENANTS + 1
    assert waiting[OTHER] == 2 * MAX_TENANTS


def test_no_tenant_shares_the_label_of_those_without_one_by_its_name() -> None:
    assert not is_name(OTHER)
    counts = TenantCounts(Clock())
    for name in ("other", *(f"t{number}" for number in range(MAX_TENANTS))):
        counts.rejected(name)
    assert (counts.num_rejected["other"], counts.num_rejected[OTHER]) == (1, 1)


def test_a_tenant_with_more_tokens_gets_the_label_of_one_with_fewer() -> None:
    clock = Clock()
    counts = TenantCounts(clock)
    for number in range(MAX_TENANTS):
        counts.tokens(f"t{number}", "prompt", 10 + number)
    counts.tokens("big", "generated", 1000)
    assert counts.num_tokens[OTHER, "generated"] == 1000
    counts.update([])
    assert counts.labels.of("big") == OTHER, "it is not time yet"
    clock.now_s = INTERVAL_S
    counts.update([])
    assert counts.labels.of("big") == "big"
    assert counts.labels.of("t0") == OTHER
    assert ("t0", "prompt") not in counts.num_tokens, "its series has ended"
    counts.tokens("t0", "prompt", 3)
    counts.tokens("big", "generated", 7)
    assert counts.num_tokens[OTHER, "prompt"] == 3
    assert counts.num_tokens["big", "generated"] == 7
    assert counts.num_tokens[OTHER, "generated"] == 1000, "what was counted stays where it was counted"


def test_old_tokens_count_less_for_a_label() -> None:
    clock = Clock()
    labels = TenantLabels(clock)
    labels.distribute()
    for number in range(MAX_TENANTS):
        labels.weigh(f"old {number}", 1000)
    clock.now_s = 12 * 300.0
    labels.distribute()
    labels.weigh("new", 1)
    clock.now_s += INTERVAL_S
    labels.distribute()
    assert labels.of("new") == "new"


def test_service_is_that_of_the_core_and_a_restarted_core_adds_to_it() -> None:
    counts, first = TenantCounts(Clock()), Account("a")
    for cost in (5, 9):
        first.cost = cost
        counts.update([first])
    assert counts.service["a"] == 9
    second = Account("a")
    second.cost = 4
    counts.update([second])
    assert counts.service["a"] == 13


@pytest.mark.parametrize("seed", range(5))
def test_no_series_decreases_and_their_number_is_bounded(seed: int) -> None:
    """In a random world, a series that is there in two scrapes has grown, and `other` is never removed."""
    random, clock = Random(seed), Clock()
    counts = TenantCounts(clock)
    accounts = [Account(f"t{number}") for number in range(60)]
    pages = []
    for _ in range(200):
        clock.now_s += random.uniform(0, INTERVAL_S)
        favourite = random.randrange(60)
        for _ in range(30):
            account = accounts[(favourite + int(random.expovariate(0.1))) % 60]
            num_tokens = random.randint(1, 100)
            account.cost += num_tokens
            counts.tokens(account.name, random.choice(("prompt", "generated")), num_tokens)
            counts.rejected(account.name)
        counts.update(accounts)
        pages.append(
            {"tokens": dict(counts.num_tokens), "rejected": dict(counts.num_rejected), "service": dict(counts.service)}
        )
    for before, after in pairwise(pages):
        for name in before:
            assert all(after[name][key] >= value for key, value in before[name].items() if key in after[name])
            assert len(after[name]) <= 2 * (MAX_TENANTS + 1)
        assert OTHER in after["service"] or OTHER not in before["service"]
    assert len({label for page in pages for label in page["service"]}) > MAX_TENANTS + 1, "labels have changed hands"


def test_the_number_of_weights_is_bounded_and_heavy_tenants_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_counts, "MAX_WEIGHTS", 50)
    assert MAX_WEIGHTS > MAX_TENANTS
    clock = Clock()
    labels = TenantLabels(clock)
    labels.distribute()
    for number in range(2000):
        labels.weigh(f"small {number}", 1)
        labels.weigh("heavy", 5)
    clock.now_s = INTERVAL_S
    labels.distribute()
    assert labels.of("heavy") == "heavy"
    assert len(labels._weights) == 50


def test_tenants_whose_names_begin_alike_have_labels_of_their_own() -> None:
    names = ["a" * 127 + last for last in "xy"]
    assert all(map(is_name, names))
    labels = TenantLabels(Clock())
    assert [labels.of(name) for name in names] == names
