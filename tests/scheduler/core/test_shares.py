"""Tenants get fair shares of the service (I22), whatever the others send."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain, islice
from math import inf

import pytest

from scheduler.core import BeamParams, Logprobs, QueueFull, Sequence, StepResult, TenantTerms
from scheduler.core.fairness.accounts import MAX_IDLE_ACCOUNTS, Accounts
from scheduler.core.fairness.fair_queue import MAX_SET_ASIDE, FairQueue
from scheduler.core.tenants.account import GENERATED_TOKEN_COST, equal_terms
from tests.support.core.share_mutations import MUTATIONS
from tests.support.core.share_world import ShareWorld, gap_bound, run_world
from tests.support.core.shares import limits, request, scheduler_of, step


def jain_index(values: Iterable[float]) -> float:
    """Returns 1 if all values are equal, 1/n if one of n has everything (Jain, Chiu and Hawe, 1984)."""
    values = list(values)
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


# --- the service gap ------------------------------------------------------------------------------------------


FINDERS = (0, 1, 4, 17, 25, 60, 129)
"""Seeds that find the mutations soon. The last one finds what few do: that no sequence is preempted for the share of
another tenant."""


@pytest.mark.parametrize("seed", sorted({*range(12), *FINDERS}))
def test_the_gap_of_backlogged_tenants_is_bounded(seed: int) -> None:
    run_world(seed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(12, 100, 11))
def test_the_gap_is_bounded_in_many_worlds(first: int) -> None:
    run_worlds(range(first, first + 11))


def run_worlds(seeds: Iterable[int]) -> None:
    for seed in seeds:
        run_world(seed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mutate", MUTATIONS)
def test_each_mutation_is_found(monkeypatch: pytest.MonkeyPatch, mutate: Callable[[pytest.MonkeyPatch], None]) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match="I22: the gap"):
        run_worlds(chain(FINDERS, range(200)))


def test_eight_tenants_get_equal_service_though_one_sends_a_hundred_times_the_requests() -> None:
    names = "abcdefgh"
    backlog = {name: 1000 if name == "a" else 10 for name in names}
    world = ShareWorld(limits(16), dict.fromkeys(names, "mixed"), backlog=backlog)
    world.run(1500)
    assert jain_index(world.watch.service[name] for name in names) >= 0.95
    assert jain_index(world.num_tokens[name] for name in names) >= 0.95


def test_service_is_proportional_to_the_weights() -> None:
    terms = {"heavy": TenantTerms(weight=3)}
    world = ShareWorld(limits(8), {"heavy": "short", "light": "short"}, terms=terms, backlog={"heavy": 40, "light": 40})
    world.run(1500)
    assert world.watch.service["heavy"] / world.watch.service["light"] == pytest.approx(3, rel=0.02)


def test_a_tenant_that_fills_all_slots_and_the_queue_does_not_keep_others_from_their_first_token() -> None:
    scheduler = scheduler_of(limits(64, max_num_batched_tokens=512, max_model_len=4000, max_ahead=512))
    scheduler.add(request(1, "greedy", output=3990, n=64))
    for number in range(4000):
        scheduler.add(request(2 + number, "greedy", output=3990))
    for _ in range(10):
        assert set(step(scheduler)) == {"greedy"}
    scheduler.add(request(9999, "other"))
    num_steps = next(number for number in range(1, 100) if "other" in step(scheduler))
    assert num_steps <= 3
    assert scheduler.state.counters.num_preemptions == 1


def test_preemption_for_shares_stops_when_the_tenants_run_equally_many_sequences() -> None:
    world = ShareWorld(limits(8, max_ahead=64, max_preemptions=10**6), {"a": "all slots", "b": "long output"})
    world.absent = {"b"}
    world.run(20)
    world.absent = set()
    world.run(300)
    running = [sequence.request.tenant for sequence in world.scheduler.state.batch.running]
    assert 3 <= running.count("b") <= 5
    num_preemptions = world.scheduler.state.counters.num_preemptions
    world.run(60)
    assert world.scheduler.state.counters.num_preemptions - num_preemptions <= 2


def test_guaranteed_sequences_of_one_tenant_hold_at_most_its_share_beside_others() -> None:
    world = ShareWorld(limits(8, max_ahead=0, max_preemptions=1), {"a": "all slots", "b": "short"})
    most = 0
    for _ in range(1500):
        world.step()
        running = world.scheduler.state.batch.running
        most = max(most, sum(sequence.is_guaranteed for sequence in running))
    assert 1 <= most <= 4 + 1  # a share of one half of 8 slots, and the sequence that reaches it


def test_each_row_of_a_late_beam_adds_to_the_bound_of_the_gap() -> None:
    """The other tenant waits for all slots, which is more than its part, so it displaces none."""
    num_late, width = 200, 4
    most = limits(width, max_model_len=40, max_ahead=10**6, max_preemptions=10**6)
    scheduler = scheduler_of(most)
    beams = BeamParams(width, 1)
    for number in (1, 2):
        scheduler.add(replace(request(number, "beams", output=36), beam=beams))
    scheduler.add(request(3, "other", output=36, n=width))
    for number in range(2 + num_late):
        plan = scheduler.schedule()
        assert plan is not None
        values = [-float(place) for place in range(2 * width)] if number < 2 else [inf] * (2 * width)
        num_rows = len(scheduler.state.in_flight[-1].beams)
        candidates = Logprobs(list(range(2 * width)) * num_rows, values * num_rows)
        scheduler.commit(StepResult(plan.epoch, plan.step_id, [], candidates=candidates))
        scheduler.expire(float(number))
    ahead, behind = (scheduler.state.accounts.of(name).level for name in ("beams", "other"))
    bound = gap_bound(most, 1.0, has_guarantees=True)
    num_late_rows = num_late * width
    assert bound < ahead - behind <= bound + GENERATED_TOKEN_COST * num_late_rows


# --- counters -------------------------------------------------------------------------------------------------


def test_computed_prompt_tokens_and_generated_tokens_are_charged() -> None:
    scheduler = scheduler_of(limits())
    scheduler.add(request(1, "a", prompt=9, output=3, n=2))
    while scheduler.num_unfinished_requests:
        step(scheduler)
    assert scheduler.state.accounts.of("a").cost == 9 + 2 * (2 * 3)
    scheduler.add(request(2, "a", prompt=9, output=1))
    step(scheduler)
    assert scheduler.state.accounts.of("a").cost == 21 + 1 + 2  # eight tokens were found in the prefix cache


def test_prompt_tokens_with_log_probabilities_cost_more() -> None:
    scheduler = scheduler_of(limits())
    scheduler.add(request(1, "plain", prompt=20, output=9))
    scheduler.add(request(2, "reported", prompt=20, output=9, num_prompt_logprobs=21))
    scheduler.schedule()
    plain, reported = (scheduler.state.accounts.of(name).cost for name in ("plain", "reported"))
    assert reported > plain == 20


def test_a_recompute_is_not_charged() -> None:
    scheduler = scheduler_of(limits())
    scheduler.add(request(1, "a", prompt=9, output=9))
    step(scheduler)
    cost = scheduler.state.accounts.of("a").cost
    scheduler.executor_lost()
    scheduler.executor_attached(2, 1000)
    scheduler.schedule()
    assert scheduler.state.accounts.of("a").cost == cost


def test_a_tenant_that_comes_back_is_lifted_to_the_least_of_those_in_the_queue() -> None:
    scheduler = scheduler_of(limits())
    accounts = scheduler.state.accounts
    for number, tenant in enumerate(("first", "second")):
        scheduler.add(request(number, tenant))
    accounts.of("first").cost, accounts.of("second").cost = 500, 300
    scheduler.add(request(3, "third"))
    assert accounts.of("third").level == 300
    accounts.of("third").cost += 50
    for number in (0, 1, 3):
        scheduler.cancel(number)
    accounts.of("third").cost += 250
    scheduler.add(request(4, "fourth"))
    assert accounts.of("fourth").level == 600  # none waits, so none is owed anything: that of the tenant with the most
    scheduler.add(request(5, "first"))
    assert accounts.of("first").level == 600
    accounts.of("first").cost += 50
    scheduler.add(request(6, "first"))
    assert accounts.of("first").level == 650  # a lift never lowers


def test_tenants_of_another_priority_do_not_decide_how_far_a_tenant_is_lifted() -> None:
    """A tenant that starves behind the others has the smallest counter of all."""
    scheduler = scheduler_of(limits(1), starving=TenantTerms(priority=1))
    accounts = scheduler.state.accounts
    for number, tenant in enumerate(("starving", "busy", "busy")):
        scheduler.add(request(number, tenant))
    accounts.of("busy").cost = 500
    scheduler.add(request(3, "new"))
    assert (accounts.of("new").level, accounts.of("starving").level) == (500, 0)


def test_tenants_that_are_all_at_their_caps_save_no_service() -> None:
    """Otherwise a new tenant was lifted to the smaller counter, and was served alone until it had the larger one."""
    terms = {"slow": TenantTerms(weight=100, max_num_seqs=1), "fast": TenantTerms(max_num_seqs=1)}
    scheduler = scheduler_of(limits(3), **terms)
    for number, tenant in enumerate(("slow", "slow", "fast", "fast")):
        scheduler.add(request(number, tenant, prompt=1, output=300))
    for _ in range(200):
        step(scheduler)
    scheduler.add(request(4, "new"))
    accounts = scheduler.state.accounts
    assert accounts.of("new").level >= accounts.of("fast").level - 2 * 1 > 300


def test_the_number_of_accounts_is_bounded() -> None:
    accounts = Accounts(equal_terms)
    for number in range(3 * MAX_IDLE_ACCOUNTS):
        accounts.request_ended(accounts.request_added(f"tenant {number}"))
    assert len(list(accounts)) <= MAX_IDLE_ACCOUNTS + 2


def test_accounts_of_tenants_that_were_all_there_at_once_are_forgotten() -> None:
    accounts = Accounts(equal_terms)
    for account in [accounts.request_added(f"tenant {number}") for number in range(3 * MAX_IDLE_ACCOUNTS)]:
        accounts.request_ended(account)
    accounts.request_added("new")
    assert len(accounts) == MAX_IDLE_ACCOUNTS + 1


def test_a_tenant_whose_requests_are_refused_gets_no_account() -> None:
    scheduler = scheduler_of(limits(4, max_waiting_requests=2))
    scheduler.add(request(1, "a"))
    scheduler.add(request(2, "b"))
    for number in range(3, 100):
        with pytest.raises(QueueFull):
            scheduler.add(request(number, f"tenant {number}"))
    assert len(scheduler.state.accounts) == 2


def test_a_tenant_keeps_its_account_when_accounts_are_forgotten() -> None:
    """With a new account for each request, no cap and no share of a tenant would count."""
    accounts = Accounts(equal_terms)
    for number in range(2 * MAX_IDLE_ACCOUNTS):
        account = accounts.request_added(f"tenant {number}")
        account.cost += 100.0
        accounts.request_ended(account)
    for tenant in ("a", "b", "c"):
        assert len({id(accounts.request_added(tenant)) for _ in range(8)}) == 1
        assert accounts.of(tenant).num_requests == 8
    assert [account.name for account in accounts.active] == ["a", "b", "c"]


def linear_first(queue: FairQueue) -> Sequence | None:
    """Returns the sequence that is next, by a comparison of all tenants."""
    looked_at = (islice(own, MAX_SET_ASIDE) for own in queue._queues.values())
    firsts = (next((sequence for sequence in own if not sequence.is_set_aside), None) for own in looked_at)
    heads = [head for head in firsts if head is not None and queue.may_enter(head)]

    def place(head: Sequence) -> tuple[int, float, bool, int]:
        account = head.account
        return (account.terms.priority, account.level, account.level > account.entry_level, head.arrival)

    return min(heads, key=place, default=None)


@pytest.mark.parametrize("seed", range(6))
def test_the_next_sequence_is_that_of_a_comparison_of_all_tenants(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Checked in worlds with caps, guaranteed sequences, preemptions and tenants that come and go."""
    first, num_chosen = FairQueue.first, 0

    def compared(queue: FairQueue) -> Sequence | None:
        nonlocal num_chosen
        expected = linear_first(queue)
        assert first(queue) is expected
        num_chosen += expected is not None
        return expected

    monkeypatch.setattr(FairQueue, "first", compared)
    run_world(seed, 600)
    world = ShareWorld(
        limits(6, max_ahead=16),
        {"a": "mixed", "b": "short", "c": "all slots", "d": "mixed"},
        terms={"a": TenantTerms(max_num_seqs=2), "b": TenantTerms(priority=1), "d": TenantTerms(weight=2)},
        num_blocks=120,
        seed=seed,
    )
    for _ in range(600):
        if world.random.random() < 0.1:
            world.absent = set(world.random.sample("abcd", world.random.randint(0, 3)))
        if world.random.random() < 0.05 and world.scheduler.state.requests:
            world.scheduler.cancel(world.random.choice(list(world.scheduler.state.requests)))
        world.step()
    assert num_chosen > 500


def test_replaced_entries_of_the_queue_are_removed() -> None:
    scheduler = scheduler_of(limits(1), last=TenantTerms(priority=1))
    scheduler.add(request(0, "first"))
    for number in range(1, 1000):
        scheduler.add(request(number, "last"))
        scheduler.cancel(number)
    assert len(scheduler.state.waiting._heap) <= 2 * 2 + 64
