"""The order of tenants in the queue, and their caps."""

import pytest

from scheduler.core import CapacityExceeded, FinishReason, QueueFull, TenantLimitReached, TenantTerms
from tests.support.core.shares import admitted, limits, request, scheduler_of, step


def test_the_least_served_tenant_is_next_and_ties_go_to_the_first_to_arrive() -> None:
    scheduler = scheduler_of(limits(4))
    for number, tenant in enumerate("aaab"):
        scheduler.add(request(number, tenant))
    assert admitted(scheduler) == [0, 3, 1, 2]


def test_the_priority_that_the_operator_gives_comes_first() -> None:
    scheduler = scheduler_of(limits(4), urgent=TenantTerms(priority=-1))
    for number, tenant in enumerate(("usual", "usual", "urgent", "urgent")):
        scheduler.add(request(number, tenant))
    assert admitted(scheduler) == [2, 3, 0, 1]


def test_a_tenant_at_its_cap_of_sequences_is_passed_over() -> None:
    scheduler = scheduler_of(limits(8), capped=TenantTerms(max_num_seqs=2))
    for number, tenant in enumerate(("capped", "capped", "capped", "other")):
        scheduler.add(request(number, tenant))
    assert admitted(scheduler) == [0, 3, 1]
    assert [sequence.request.request_id for sequence in scheduler.state.waiting] == [2]
    with pytest.raises(CapacityExceeded, match="you may run 2"):
        scheduler.add(request(9, "capped", n=3))


def test_samples_that_have_ended_do_not_count_for_the_cap() -> None:
    scheduler = scheduler_of(limits(8), capped=TenantTerms(max_num_seqs=3))
    scheduler.add(request(1, "capped", n=3, output=100))
    step(scheduler)
    scheduler.stop(1, 0)
    scheduler.add(request(2, "capped", output=100))
    scheduler.add(request(3, "capped"))
    for _ in range(3):
        step(scheduler)
    assert [(s.request.request_id, s.index) for s in scheduler.state.batch.running] == [(1, 1), (1, 2), (2, 0)]


def test_the_caps_of_a_tenants_queue_refuse_its_requests_only() -> None:
    terms = TenantTerms(max_waiting_requests=2, max_waiting_prompt_tokens=30)
    scheduler = scheduler_of(limits(), a=terms, b=terms)
    scheduler.add(request(1, "a"))
    scheduler.add(request(2, "a"))
    with pytest.raises(TenantLimitReached, match="2 requests of yours are waiting"):
        scheduler.add(request(3, "a"))
    scheduler.add(request(4, "b", prompt=100))
    with pytest.raises(TenantLimitReached, match="100 prompt tokens of yours"):
        scheduler.add(request(5, "b"))
    scheduler.add(request(6, "c"))


def test_a_tenant_that_fills_the_queue_does_not_keep_others_out() -> None:
    """A full queue takes requests of others, as many as an equal part of it, and at most twice its bound in all."""
    scheduler = scheduler_of(limits(max_waiting_requests=8))

    def fill(tenant: str) -> int:
        refused: list[QueueFull] = []
        for number in range(100):
            try:
                scheduler.add(request(1000 * ord(tenant) + number, tenant))
            except QueueFull as error:
                refused.append(error)
                break
        assert [type(error) for error in refused] == [QueueFull]  # this scheduler is full: another one may have room
        return number

    assert [fill(tenant) for tenant in "abca"] == [8, 4, 2, 0]
    assert sum(fill(tenant) for tenant in "defghij") <= 2
    assert scheduler.num_waiting <= 16


def test_a_tenant_that_fills_the_queue_with_long_prompts_does_not_keep_others_out() -> None:
    scheduler = scheduler_of(limits(max_waiting_prompt_tokens=400, max_model_len=400))
    for number in range(2):
        scheduler.add(request(number, "a", prompt=200))
    with pytest.raises(QueueFull):
        scheduler.add(request(3, "a", prompt=1))
    scheduler.add(request(4, "b", prompt=200))
    with pytest.raises(QueueFull, match="of yours"):
        scheduler.add(request(5, "b", prompt=1))


def test_for_lack_of_blocks_the_tenant_with_the_most_service_is_preempted() -> None:
    scheduler = scheduler_of(limits(4), num_blocks=13)
    scheduler.add(request(1, "greedy", prompt=12, output=30))
    for _ in range(8):
        step(scheduler)
    scheduler.add(request(2, "modest", prompt=12, output=30))
    scheduler.state.accounts.of("greedy").cost += 100
    sequences = [scheduler.state.requests[request_id].sequences[0] for request_id in (1, 2)]
    while not scheduler.state.counters.num_preemptions:
        step(scheduler)
    assert [sequence.num_preemptions for sequence in sequences] == [1, 0]


def test_ended_requests_leave_no_active_tenant() -> None:
    scheduler = scheduler_of(limits())
    scheduler.add(request(1, "a"))
    scheduler.add(request(2, "b"))
    scheduler.cancel(1)
    assert [account.name for account in scheduler.state.accounts.active] == ["b"]
    assert scheduler.state.end_request(1, FinishReason.CANCELLED) == []
