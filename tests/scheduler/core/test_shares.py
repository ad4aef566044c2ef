"""Tenants get fair shares of the service (I22), whatever the others send."""

from collections.abc import Callable, Iterable

import pytest

from scheduler.core import (
    CapacityExceeded,
    FinishReason,
    QueueFull,
    Request,
    Scheduler,
    SchedulerLimits,
    Sequence,
    SequenceParams,
    StepResult,
    TenantTerms,
)
from scheduler.core.fairness.accounts import MAX_IDLE_ACCOUNTS, Accounts
from scheduler.core.fairness.fair_queue import FairQueue
from scheduler.core.tenants.account import Account, equal_terms
from tests.support.core.share_world import ShareWorld, run_world


def limits(max_num_seqs: int = 8, **values: int) -> SchedulerLimits:
    return SchedulerLimits(
        max_num_seqs, values.pop("max_num_batched_tokens", 64), values.pop("max_model_len", 400), **values
    )


def request(request_id: int, tenant: str, *, prompt: int = 4, output: int = 4, n: int = 1, **fields: int) -> Request:
    params = SequenceParams(max_total_tokens=prompt + output, num_prompt_logprobs=fields.pop("num_prompt_logprobs", 0))
    return Request(request_id, [1] * prompt, params, seeds=tuple(range(n)), tenant=tenant, **fields)


def scheduler_of(limits: SchedulerLimits, num_blocks: int = 10_000, **terms: TenantTerms) -> Scheduler:
    scheduler = Scheduler(
        limits, num_blocks=num_blocks, block_size=4, terms_of=lambda name: terms.get(name, TenantTerms())
    )
    scheduler.executor_attached(1, num_blocks)
    return scheduler


def step(scheduler: Scheduler) -> list[str]:
    """Does one step; returns the tenants of the sequences that got a token."""
    plan = scheduler.schedule()
    assert plan is not None
    num_sampled = len(scheduler.state.in_flight[-1].sampled)
    events = scheduler.commit(StepResult(plan.epoch, plan.step_id, [7] * num_sampled))
    return [sequence.request.tenant for sequence in events.sequences]


def jain_index(values: Iterable[float]) -> float:
    """Returns 1 if all values are equal, 1/n if one of n has everything (Jain, Chiu and Hawe, 1984)."""
    values = list(values)
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


# --- the service gap ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_the_gap_of_backlogged_tenants_is_bounded(seed: int) -> None:
    run_world(seed)


@pytest.mark.exhaustive
def test_the_gap_is_bounded_in_many_worlds() -> None:
    run_worlds(range(12, 200))


def run_worlds(seeds: Iterable[int]) -> None:
    for seed in seeds:
        run_world(seed)


def charge_no_tokens(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Accounts, "charge_tokens", lambda accounts, sequences, num_tokens=1: None)


def charge_no_prompts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Accounts, "charge_admission", lambda accounts, sequence: None)


def ignore_weights(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Account, "level", property(lambda account: account.lift + account.cost))


def save_service_for_later(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Account, "raise_to", lambda account, level: None)


def admit_in_order_of_arrival(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FairQueue, "first", lambda queue: min(queue, key=lambda sequence: sequence.arrival, default=None))


def never_preempt_for_shares(patch: pytest.MonkeyPatch) -> None:
    choose_victim = FairQueue.choose_victim
    patch.setattr(
        FairQueue, "choose_victim", lambda queue, is_short: choose_victim(queue, is_short=True) if is_short else None
    )


MUTATIONS = [
    charge_no_tokens,
    charge_no_prompts,
    ignore_weights,
    save_service_for_later,
    admit_in_order_of_arrival,
    never_preempt_for_shares,
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("mutate", MUTATIONS)
def test_each_mutation_is_found(monkeypatch: pytest.MonkeyPatch, mutate: Callable[[pytest.MonkeyPatch], None]) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match="I22: the gap"):
        run_worlds(range(200))


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
    assert num_steps <= 2 + 512 // (64 * 2)  # the greedy tenant gets max_ahead at 64 tokens a step
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
    scheduler.add(request(4, "fourth"))
    assert accounts.of("fourth").level == 350  # that of the last tenant to leave the queue
    scheduler.add(request(5, "first"))
    assert accounts.of("first").level == 500  # a lift never lowers


def test_the_number_of_accounts_is_bounded() -> None:
    accounts = Accounts(equal_terms)
    for number in range(3 * MAX_IDLE_ACCOUNTS):
        accounts.request_ended(accounts.request_added(f"tenant {number}"))
    assert len(list(accounts)) <= MAX_IDLE_ACCOUNTS + 2


def linear_first(queue: FairQueue) -> Sequence | None:
    """Returns the sequence that is next, by a comparison of all tenants."""
    heads = [head for account in queue._queues if (head := queue.of(account).first()) is not None]
    heads = [head for head in heads if queue.may_enter(head)]
    return min(heads, key=lambda s: (s.account.terms.priority, s.account.level, s.arrival), default=None)


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


# --- order and caps -------------------------------------------------------------------------------------------


def admitted(scheduler: Scheduler) -> list[int]:
    scheduler.schedule()
    return [sequence.request.request_id for sequence, _ in scheduler.state.in_flight[-1].admitted]


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


def test_the_caps_of_a_tenants_queue_refuse_its_requests_only() -> None:
    terms = TenantTerms(max_waiting_requests=2, max_waiting_prompt_tokens=30)
    scheduler = scheduler_of(limits(), a=terms, b=terms)
    scheduler.add(request(1, "a"))
    scheduler.add(request(2, "a"))
    with pytest.raises(QueueFull, match="2 requests of yours are waiting"):
        scheduler.add(request(3, "a"))
    scheduler.add(request(4, "b", prompt=100))
    with pytest.raises(QueueFull, match="100 prompt tokens of yours"):
        scheduler.add(request(5, "b"))
    scheduler.add(request(6, "c"))


def test_a_tenant_that_fills_the_queue_does_not_keep_others_out() -> None:
    """A full queue takes requests of others, as many as an equal part of it, and at most twice its bound in all."""
    scheduler = scheduler_of(limits(max_waiting_requests=8))

    def fill(tenant: str) -> int:
        for number in range(100):
            try:
                scheduler.add(request(1000 * ord(tenant) + number, tenant))
            except QueueFull:
                return number
        raise AssertionError("the queue takes any number of requests")

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
