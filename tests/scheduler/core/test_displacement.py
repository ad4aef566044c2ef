"""A tenant that waits displaces sequences of tenants beyond their parts of the batch, and pays for it (I22)."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from scheduler.core import ReceivedOutput, Scheduler, Sequence, StepResult, TenantTerms
from scheduler.core.fairness import victims
from scheduler.core.fairness.accounts import Accounts
from scheduler.core.tenants.account import Account
from tests.support.core.shares import limits, request, scheduler_of, step


def add(scheduler: Scheduler, request_id: int, tenant: str, *, prompt: int = 4, output: int = 300, n: int = 1) -> None:
    scheduler.add(request(request_id, tenant, prompt=prompt, output=output, n=n))


def num_running(scheduler: Scheduler, tenant: str) -> int:
    return sum(sequence.request.tenant == tenant for sequence in scheduler.state.batch.running)


def account(scheduler: Scheduler, tenant: str) -> Account:
    return scheduler.state.accounts.of(tenant)


def full_of(tenant: str, num_requests: int = 20, num_steps: int = 5, **options: TenantTerms) -> Scheduler:
    """Returns a scheduler whose eight slots are held by one tenant, which has more requests in the queue."""
    scheduler = scheduler_of(limits(max_num_batched_tokens=256), **options)
    for number in range(num_requests):
        add(scheduler, number, tenant)
    for _ in range(num_steps):
        step(scheduler)
    return scheduler


def displaced_of(scheduler: Scheduler) -> Sequence:
    """Does steps until a sequence has been displaced; returns it."""
    for _ in range(10):
        step(scheduler)
        for active in scheduler.state.requests.values():
            for sequence in active.sequences:
                if sequence.displaced_by is not None:
                    return sequence
    raise AssertionError("no sequence was displaced")


def test_each_request_of_a_tenant_that_sends_one_at_a_time_starts_at_once() -> None:
    """Its counter is lifted each time that it comes back, so it never falls far behind the other tenant."""
    scheduler = full_of("greedy")
    for number in range(20):
        add(scheduler, 100 + number, "modest", output=3)
        num_steps = next(count for count in range(1, 100) if "modest" in step(scheduler))
        assert num_steps <= 2
        while 100 + number in scheduler.state.requests:
            step(scheduler)


def test_a_request_that_arrives_during_a_step_is_in_the_plan_after_those_in_flight() -> None:
    scheduler = full_of("greedy")
    sent = [scheduler.schedule(), scheduler.schedule()]
    add(scheduler, 100, "modest")
    for plan in sent:
        assert plan is not None
        assert scheduler.schedule() is None  # no sequence is preempted while plans are in flight
        scheduler.commit(StepResult(plan.epoch, plan.step_id, [7] * len(scheduler.state.in_flight[0].sampled)))
    assert "modest" in step(scheduler)


def test_no_plan_without_a_newcomer_is_made_after_it_came() -> None:
    """Its counter is lifted to that of the tenant that holds all slots, whose tokens in flight are not charged yet."""
    scheduler = full_of("greedy")
    for number in range(5):
        plan = scheduler.schedule()
        assert plan is not None
        add(scheduler, 100 + number, "modest", output=1)
        assert account(scheduler, "modest").level == account(scheduler, "greedy").level
        assert scheduler.schedule() is None
        scheduler.commit(StepResult(plan.epoch, plan.step_id, [7] * len(scheduler.state.in_flight[0].sampled)))
        assert "modest" in step(scheduler)


def test_a_tenant_displaces_others_up_to_its_part_only() -> None:
    scheduler = full_of("greedy")
    for number in range(20):
        add(scheduler, 100 + number, "modest")
    for _ in range(20):
        step(scheduler)
    assert num_running(scheduler, "modest") == num_running(scheduler, "greedy") == 4
    assert scheduler.state.counters.num_preemptions == 4


def test_parts_are_by_weight() -> None:
    scheduler = full_of("greedy", modest=TenantTerms(weight=1 / 3))
    for number in range(20):
        add(scheduler, 100 + number, "modest")
    for _ in range(10):
        step(scheduler)
    assert num_running(scheduler, "modest") == 2


def test_a_request_for_more_samples_than_its_part_displaces_none_before_others_are_far_ahead() -> None:
    scheduler = full_of("greedy")
    add(scheduler, 100, "modest", n=5)
    for _ in range(20):
        assert set(step(scheduler)) == {"greedy"}


def test_samples_that_are_resumed_displace_others_one_by_one() -> None:
    """Each takes one slot, unlike a request whose samples start together."""
    scheduler = full_of("greedy")
    resumed = request(100, "modest", n=5, output=300)
    scheduler.add(replace(resumed, outputs=tuple(ReceivedOutput([7] * 3) for _ in range(5))))
    for _ in range(10):
        step(scheduler)
    assert num_running(scheduler, "modest") == num_running(scheduler, "greedy") == 4


def test_tenants_that_are_more_than_the_slots_do_not_displace_one_another() -> None:
    scheduler = full_of("t0", num_requests=1)
    for number in range(1, 40):
        add(scheduler, number, f"t{number}")
    for _ in range(30):
        step(scheduler)
    assert scheduler.state.counters.num_preemptions == 0


def test_a_tenant_with_all_blocks_loses_some_though_slots_are_free() -> None:
    scheduler = scheduler_of(limits(max_num_batched_tokens=256), num_blocks=101)
    add(scheduler, 1, "greedy", prompt=180, output=100)
    add(scheduler, 2, "greedy", prompt=190, output=100)
    while len(scheduler.state.batch.decoding) < 2:
        step(scheduler)
    add(scheduler, 3, "modest", prompt=40, output=3)
    assert next(count for count in range(1, 100) if "modest" in step(scheduler)) <= 3


def test_the_tenant_that_came_pays_for_what_others_compute_again() -> None:
    scheduler = full_of("greedy", num_requests=8, num_steps=50)
    add(scheduler, 100, "modest", output=1)
    displaced = displaced_of(scheduler)
    assert account(scheduler, "modest").num_displaced == 1
    while account(scheduler, "modest").num_requests:
        step(scheduler)
    modest, greedy = account(scheduler, "modest").cost, account(scheduler, "greedy").cost
    scheduler.schedule()
    admitted = dict(scheduler.state.in_flight[-1].admitted)
    num_again = displaced.num_tokens - admitted[displaced]
    assert num_again > 0
    assert account(scheduler, "modest").cost == modest + num_again
    assert account(scheduler, "greedy").cost == greedy
    assert account(scheduler, "modest").num_displaced == 0


def test_a_displaced_request_that_is_cancelled_leaves_nothing_behind() -> None:
    scheduler = full_of("greedy", num_requests=8)
    add(scheduler, 100, "modest")
    displaced = displaced_of(scheduler)
    scheduler.cancel(displaced.request.request_id)
    assert account(scheduler, "modest").num_displaced == 0
    assert displaced.displaced_by is None


def test_an_urgent_tenant_displaces_others_whatever_it_has_received() -> None:
    scheduler = full_of("usual", urgent=TenantTerms(priority=-1))
    account(scheduler, "urgent").cost = 10**6
    add(scheduler, 100, "urgent")
    assert next(count for count in range(1, 100) if "urgent" in step(scheduler)) <= 3


# --- mutations ------------------------------------------------------------------------------------------------


def pay_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Accounts, "settle", lambda accounts, sequence: None)


def displace_none(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(victims, "_beyond_their_parts", lambda *arguments: set())


def displace_without_bound(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Accounts, "share", lambda accounts, account: 1.0 if account.name == "modest" else 0.0)


@pytest.mark.parametrize(
    ("mutate", "test"),
    [
        (pay_nothing, test_the_tenant_that_came_pays_for_what_others_compute_again),
        (displace_none, test_each_request_of_a_tenant_that_sends_one_at_a_time_starts_at_once),
        (displace_without_bound, test_a_tenant_displaces_others_up_to_its_part_only),
    ],
)
def test_each_mutation_is_found(
    monkeypatch: pytest.MonkeyPatch, mutate: Callable[[pytest.MonkeyPatch], None], test: Callable[[], None]
) -> None:
    mutate(monkeypatch)
    with pytest.raises((AssertionError, StopIteration, KeyError)):
        test()
