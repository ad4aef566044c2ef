"""A tenant finds only its own prefixes, whatever salt it chooses."""

from scheduler.core import Request, Scheduler, SchedulerLimits, SequenceParams, StepResult
from scheduler.requests.salts import tenant_salt


def num_cached(*senders: tuple[str, bytes]) -> list[int]:
    """Sends the same prompt for each tenant and salt; returns how many of its tokens were found in the cache."""
    scheduler = Scheduler(SchedulerLimits(2, 64, 100), num_blocks=50, block_size=4)
    scheduler.executor_attached(1, 50)
    found = []
    for number, (tenant, salt) in enumerate(senders):
        params = SequenceParams(max_total_tokens=18)
        scheduler.add(Request(number, [1] * 17, params, cache_salt=tenant_salt(tenant, salt), tenant=tenant))
        plan = scheduler.schedule()
        assert plan is not None
        events = scheduler.commit(StepResult(plan.epoch, plan.step_id, [3]))
        found.append(events.started[0].num_cached_tokens or 0)
    return found


def test_tenants_do_not_see_each_others_prefixes() -> None:
    assert num_cached(("a", b""), ("b", b""), ("default", b""), ("a", b"")) == [0, 0, 0, 16]


def test_the_clients_salt_counts_within_its_tenant() -> None:
    assert num_cached(("a", b"x"), ("a", b""), ("b", b"x"), ("a", b"x")) == [0, 0, 0, 16]


def test_no_client_can_write_the_salt_of_another_tenant() -> None:
    salts = {
        tenant_salt(tenant, salt.encode()) for tenant in ("default", "a", "aa") for salt in ("", "a", "aa", "\xffa\xff")
    }
    assert len(salts) == 12


def test_the_default_tenant_keeps_its_hashes() -> None:
    assert tenant_salt("default", b"salt") == b"salt"
