"""Faults that users of other routers have reported do not occur here. Each test names the report."""

import random
from collections import Counter

import pytest

from gateway.routing.choice import POLICIES, make_choice
from gateway.routing.ring import MAX_EXCESS
from tests.support.gateway.routed_fleet import RoutedFleet, busy, prompt, replicas_of

LOAD_AWARE = [policy for policy in POLICIES if policy != "round-robin"]


def test_misses_do_not_go_to_the_smallest_cache_but_to_the_least_load() -> None:
    """Reported in sgl-project/sglang#14532: an overloaded worker with few cached prompts gets all new ones."""
    choice, replicas = make_choice("cost", random.Random(1)), replicas_of("overloaded", "idle")
    replicas.report("overloaded", busy(64, 200_000), 0)
    replicas["idle"].view.apply(1, range(10_000), [])
    chosen = Counter[str | None]()
    for i in range(40):
        asked = prompt(f"new {i}", 64)
        name = choice.choose(asked, replicas)
        assert name is not None
        replicas[name].count(asked.num_tokens or 0, asked.digests)
        chosen[name] += 1
    assert chosen == {"idle": 40}


def test_affinity_survives_the_imbalance_of_others() -> None:
    """Reported in sgl-project/sglang#32195: while any worker is overloaded, all requests ignore the caches."""
    choice = make_choice("cost", random.Random(1))
    replicas = replicas_of("hot", "holder", "empty")
    asked = prompt("p", 256)
    replicas["holder"].view.apply(1, asked.digests, [])
    replicas.report("hot", busy(200, 100_000), 0)
    replicas.report("holder", busy(4, 1_000), 0)
    assert {choice.choose(asked, replicas) for _ in range(50)} == {"holder"}


@pytest.mark.parametrize("policy", LOAD_AWARE)
def test_ties_do_not_all_go_to_the_first_replica(policy: str) -> None:
    """Reported in sgl-project/sglang#32983: with less concurrency than workers, every cache miss goes to worker 0."""
    fleet = RoutedFleet([make_choice(policy, random.Random(1))], 8)
    for i in range(400):
        fleet.send(prompt(f"prompt {i}", 4))
        fleet.serve(1_000_000)
        fleet.end()
        fleet.report()
    assert len(fleet.sent) == 8
    assert fleet.imbalance() < 2


@pytest.mark.parametrize("has_reports", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_no_replica_gets_everything_although_all_prompts_begin_alike(policy: str, has_reports: bool) -> None:
    """Reported in vllm-project/router#179: one of eight engines gets all requests. Also tested without any reports."""
    fleet = RoutedFleet([make_choice(policy, random.Random(1))], 8)
    for i in range(800):
        fleet.send(prompt(f"same/{i}", 80, 64))
        if has_reports:
            fleet.serve(100)
            fleet.report()
    assert len(fleet.sent) >= 7
    assert fleet.imbalance() <= MAX_EXCESS


@pytest.mark.parametrize("policy", ["ring", "cost"])
def test_an_unhealthy_replica_does_not_change_the_choice_among_the_others(policy: str) -> None:
    """Reported in vllm-project/router#254: an unhealthy worker without load makes healthy ones look overloaded."""
    with_sick, without = replicas_of("a", "b", "sick"), replicas_of("a", "b")
    with_sick.set_ready("sick", False)
    for replicas in (with_sick, without):
        for name in ("a", "b"):
            replicas.report(name, busy(5, 0), 0)
    for i in range(100):
        asked = prompt(f"sticky {i}")
        holder = "ab"[i % 2]
        chosen = []
        for replicas in (with_sick, without):
            replicas[holder].view.replace(0, asked.digests)
            chosen.append(make_choice(policy, random.Random(i)).choose(asked, replicas))
        assert chosen[0] == chosen[1]
        assert policy == "ring" or chosen[0] == holder


def test_a_second_router_keeps_balance_and_hits() -> None:
    """Reported in kubernetes-sigs/gateway-api-inference-extension#2102: state in one router forbids a second one."""

    def fleet_of(num_routers: int) -> RoutedFleet:
        choices = [make_choice("cost", random.Random(number)) for number in range(num_routers)]
        fleet, rng = RoutedFleet(choices, 8), random.Random(3)
        for i in range(1600):
            fleet.send(prompt(f"family {min(int(rng.paretovariate(0.9)), 40)}", 64), i % num_routers)
            fleet.serve(80)
            if i % 10 == 0:
                fleet.end()
                fleet.report()
        return fleet

    one, two = fleet_of(1), fleet_of(2)
    assert one.num_hits > 0.8 * 1600
    assert two.num_hits > 0.95 * one.num_hits
    assert two.imbalance() < 1.25 * one.imbalance()


def test_a_replica_that_reports_no_load_while_it_receives_requests_is_not_flooded() -> None:
    """A replica whose reports stand still, because it hangs, keeps the requests that it was sent as its load."""
    choice, replicas = make_choice("cost", random.Random(1)), replicas_of("hangs", "a", "b", "c")
    chosen = Counter[str | None]()
    for i in range(200):
        asked = prompt(f"prompt {i}", 16)
        name = choice.choose(asked, replicas)
        assert name is not None
        replicas[name].count(asked.num_tokens or 0, asked.digests)
        chosen[name] += 1
        replicas.report("hangs", busy(0, 0), 0)
    assert chosen["hangs"] < 60
