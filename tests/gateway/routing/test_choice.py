"""The four choices of a replica."""

import random
from collections import Counter

import pytest

from gateway.routing.choice import POLICIES, LeastCost, LeastLoaded, Prompt, RoundRobin, make_choice
from gateway.routing.load import ReplicaLoad
from tests.support.gateway.routed_fleet import PREFILL_S, RoutedFleet, busy, prompt, replicas_of

NAMES = ("a", "b", "c", "d")
RNG = random.Random(1)


@pytest.mark.parametrize("policy", POLICIES)
def test_only_replicas_that_are_ready_and_have_not_refused_are_chosen(policy: str) -> None:
    choice, replicas = make_choice(policy, random.Random(1)), replicas_of(*NAMES)
    replicas.set_ready("a", False)
    asked = prompt("p")
    replicas["a"].view.apply(1, asked.digests, [])
    assert {choice.choose(asked, replicas, {"b"}) for _ in range(50)} <= {"c", "d"}
    assert choice.choose(asked, replicas, {"b", "c"}) == "d"
    assert choice.choose(asked, replicas, {"b", "c", "d"}) is None
    assert choice.choose(asked, replicas_of()) is None


@pytest.mark.parametrize("policy", POLICIES)
def test_a_choice_changes_nothing(policy: str) -> None:
    choice, replicas = make_choice(policy, random.Random(1)), replicas_of(*NAMES)
    for _ in range(20):
        choice.choose(prompt("p"), replicas)
    assert [replicas[name].num_requests for name in NAMES] == [0] * 4
    assert len(replicas.index) == 0


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="'best' is not one of round-robin, least-loaded, ring, cost"):
        make_choice("best", RNG)


def test_round_robin_goes_around_when_replicas_come_and_go() -> None:
    choice, replicas = RoundRobin(), replicas_of(*NAMES)
    assert [choice.choose(prompt("p"), replicas) for _ in range(6)] == ["a", "b", "c", "d", "a", "b"]
    replicas.set_ready("c", False)
    assert [choice.choose(prompt("p"), replicas) for _ in range(3)] == ["d", "a", "b"]


def test_the_fewest_requests_win() -> None:
    choice, replicas = LeastLoaded(random.Random(1)), replicas_of(*NAMES)
    for name, number in zip(NAMES, (3, 1, 2, 1), strict=True):
        replicas.report(name, busy(number, 0), 0)
    chosen = Counter(choice.choose(prompt("p"), replicas) for _ in range(200))
    assert set(chosen) == {"b", "d"}
    replicas["b"].count(0)
    assert {choice.choose(prompt("p"), replicas) for _ in range(20)} == {"d"}


def test_a_cached_prefix_is_worth_the_wait_that_it_saves() -> None:
    """The prompt has 4,096 cached tokens: 4,000 queued ones are worth the wait, 4,200 are not."""
    choice, replicas, asked = LeastCost(random.Random(1)), replicas_of(*NAMES), prompt("p")
    replicas["c"].view.apply(1, asked.digests, [])
    replicas.report("c", busy(0, 3_600), 0)
    assert {choice.choose(asked, replicas) for _ in range(20)} == {"c"}
    replicas.report("c", busy(0, 4_400), 0)
    assert "c" not in {choice.choose(asked, replicas) for _ in range(20)}


def test_the_longest_prefix_wins_among_idle_replicas() -> None:
    choice, replicas, asked = LeastCost(random.Random(1)), replicas_of(*NAMES), prompt("p")
    replicas["b"].view.apply(1, asked.digests[:100], [])
    replicas["d"].view.apply(1, asked.digests[:200], [])
    assert {choice.choose(asked, replicas) for _ in range(20)} == {"d"}


def test_the_less_loaded_of_two_holders_wins() -> None:
    choice, replicas, asked = LeastCost(random.Random(1)), replicas_of(*NAMES), prompt("p")
    for name in ("b", "d"):
        replicas[name].view.apply(1, asked.digests, [])
    replicas.report("b", busy(5, 500), 0)
    assert {choice.choose(asked, replicas) for _ in range(20)} == {"d"}


def test_decodes_count_as_load() -> None:
    choice, replicas, asked = LeastCost(random.Random(1)), replicas_of("a", "b"), prompt("p", num_blocks=1)
    replicas.report("a", busy(200, 0), 0)
    assert {choice.choose(asked, replicas) for _ in range(20)} == {"b"}


def test_without_the_length_of_the_prompt_cost_is_the_ring() -> None:
    ring, cost = make_choice("ring", RNG), make_choice("cost", RNG)
    replicas = replicas_of(*NAMES)
    for i in range(50):
        asked = Prompt(f"prompt {i}".encode())
        assert cost.choose(asked, replicas) == ring.choose(asked, replicas)


def test_speeds_that_are_nearly_equal_are_equal() -> None:
    """Otherwise an idle fleet would send everything to the replica that has measured the least."""
    choice, replicas = LeastCost(random.Random(1)), replicas_of(*NAMES)
    for name, factor in zip(NAMES, (1.0, 1.01, 1.02, 1.03), strict=True):
        replicas.report(name, ReplicaLoad(prefill_s_per_token=PREFILL_S * factor), 0)
    chosen = Counter(choice.choose(prompt(f"{i}"), replicas) for i in range(400))
    assert all(chosen[name] > 40 for name in NAMES)


def test_a_slow_replica_gets_less() -> None:
    choice, replicas = LeastCost(random.Random(1)), replicas_of("fast", "slow")
    replicas.report("slow", ReplicaLoad(prefill_s_per_token=4 * PREFILL_S), 0)
    chosen: Counter[str | None] = Counter()
    for i in range(100):
        name = choice.choose(asked := prompt(f"{i}"), replicas)
        assert name is not None
        replicas[name].count(asked.num_tokens or 0)
        chosen[name] += 1
    assert 70 <= chosen["fast"] <= 90


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_seeds_choose_equally(policy: str) -> None:
    def choices() -> list[str]:
        fleet = RoutedFleet([make_choice(policy, random.Random(5))], 4)
        return [fleet.send(prompt(f"{i % 7}/{i}", 8, 6)) for i in range(50)]

    assert choices() == choices()
