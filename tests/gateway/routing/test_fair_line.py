"""Requests wait in fair order by tenant, and within a bound."""

import random

import pytest

from gateway.routing.fair_line import MAX_TENANTS, FairLine, LineFull, Place, Tenant


def taken(line: FairLine) -> Place:
    place = line.take()
    assert place is not None
    return place


def test_requests_of_one_tenant_keep_their_order() -> None:
    line = FairLine(10)
    places = [line.enter(Tenant("a")) for _ in range(5)]
    assert [taken(line) for _ in range(5)] == places
    assert line.take() is None


def test_a_tenant_with_many_requests_does_not_delay_another() -> None:
    line = FairLine(1000)
    for _ in range(500):
        line.enter(Tenant("many"))
    line.enter(Tenant("few"))
    order = []
    for _ in range(10):
        place = taken(line)
        line.charge(place.tenant, 100)
        order.append(place.tenant.name)
    assert "few" in order[:2]


def test_service_is_equal_among_tenants_that_wait() -> None:
    """Tenants differ in their rates and in the size of their requests. The gap of their service stays bounded."""
    rng, line = random.Random(1), FairLine(10_000)
    cost = {"small": 10.0, "large": 200.0, "mixed": 50.0}
    service = dict.fromkeys(cost, 0.0)
    for tenant, number in (("small", 3000), ("large", 300), ("mixed", 1000)):
        for _ in range(number):
            line.enter(Tenant(tenant))
    for _ in range(400):
        tenant = taken(line).tenant
        charged = cost[tenant.name] * rng.uniform(0.5, 1.5)
        line.charge(tenant, charged)
        service[tenant.name] += charged
        assert max(service.values()) - min(service.values()) <= 2 * 300


def test_a_tenant_whose_only_request_is_tried_in_vain_keeps_its_claim() -> None:
    """Nothing is free most of the time: the first in the line is tried again and again, and put back."""
    line, order = FairLine(1024), []
    for _ in range(200):
        line.enter(Tenant("flood"), 100)
    few = line.enter(Tenant("few"), 100)
    for _ in range(60):
        for _ in range(4):
            line.put_back(taken(line))
        place = taken(line)
        line.charge(place.tenant, 200)
        order.append(place.tenant.name)
        if place is few:
            few = line.enter(Tenant("few"), 100)
    assert order.count("few") >= 25


def test_service_is_by_weight() -> None:
    line = FairLine(1000)
    for name, weight in (("one", 1.0), ("three", 3.0)):
        for _ in range(200):
            line.enter(Tenant(name, weight), 10)
    order = [taken(line).tenant.name for _ in range(100)]
    assert 74 <= order.count("three") <= 76


def test_tenants_of_a_lower_priority_number_come_first_and_share_among_themselves() -> None:
    line = FairLine(1000)
    for name, priority in (("later", 1), ("a", 0), ("b", 0)):
        for _ in range(10):
            line.enter(Tenant(name, priority=priority), 10)
    order = [taken(line).tenant.name for _ in range(30)]
    assert sorted(order[:4]) == ["a", "a", "b", "b"]
    assert order[20:] == ["later"] * 10


def test_a_tenant_saves_no_service_for_later() -> None:
    line = FairLine(100)
    for _ in range(50):
        line.enter(Tenant("steady"))
    for _ in range(20):
        line.charge(taken(line).tenant, 100)
    for _ in range(20):
        line.enter(Tenant("late"))
    order = []
    for _ in range(20):
        place = taken(line)
        line.charge(place.tenant, 100)
        order.append(place.tenant.name)
    assert 8 <= order.count("late") <= 12


def test_a_refused_request_comes_back_to_its_place() -> None:
    line = FairLine(10)
    first, second = line.enter(Tenant("a")), line.enter(Tenant("a"))
    assert taken(line) is first
    line.put_back(first)
    assert [taken(line), taken(line)] == [first, second]


def test_requests_that_are_taken_at_once_are_those_of_all_tenants() -> None:
    line = FairLine(100)
    for tenant, cost in (("a", 10.0), ("b", 30.0)):
        for _ in range(20):
            line.enter(Tenant(tenant), cost)
    order = [taken(line).tenant.name for _ in range(16)]
    assert order.count("a") == 12, "its requests cost a third of the other's"


def test_a_refused_turn_costs_its_tenant_nothing() -> None:
    line = FairLine(100)
    for tenant in ("a", "b"):
        for _ in range(20):
            line.enter(Tenant(tenant), 10)
    for _ in range(50):  # a try of the first request, which is refused
        first = taken(line)
        line.put_back(first)
    order = [taken(line).tenant.name for _ in range(20)]
    assert order.count("a") == 10


def test_a_request_that_leaves_is_not_taken() -> None:
    line = FairLine(10)
    first, second = line.enter(Tenant("a")), line.enter(Tenant("a"))
    line.leave(first)
    line.leave(first)
    assert len(line) == 1
    assert taken(line) is second
    line.leave(second)
    assert len(line) == 0


def test_the_line_is_bounded_and_a_flood_does_not_keep_others_out() -> None:
    line = FairLine(10)
    for _ in range(10):
        line.enter(Tenant("flood"))
    with pytest.raises(LineFull):
        line.enter(Tenant("flood"))
    for _ in range(5):
        line.enter(Tenant("other"))
    with pytest.raises(LineFull):
        line.enter(Tenant("other"))
    assert len(line) == 15


def test_tenants_that_do_not_wait_are_forgotten() -> None:
    line = FairLine(10)
    for i in range(3 * MAX_TENANTS):
        line.enter(Tenant(f"tenant {i}"))
        line.take()
    assert len(line._accounts) <= MAX_TENANTS + 1


def test_a_new_weight_counts_though_the_tenant_always_has_a_request_in_the_line() -> None:
    line = FairLine(1000)
    for _ in range(3):
        line.enter(Tenant("a"), 10.0)
        line.enter(Tenant("b"), 10.0)
    order = []
    for _ in range(110):
        place = taken(line)
        order.append(place.tenant.name)
        line.enter(Tenant(place.tenant.name, weight=10.0 if place.tenant.name == "a" else 1.0), 10.0)
    assert order.count("a") > 8 * order.count("b")
