"""The victim of a preemption is cheap to compute again, and belongs to a tenant that is over its share (I23)."""

from collections.abc import Callable, Iterable, Mapping

import pytest

from scheduler.core import Policy, Request, Scheduler, SchedulerLimits, Sequence, SequenceParams, StepResult
from scheduler.core.fairness import victims
from scheduler.core.kv_cache import KVCache
from tests.support.core.overload_world import SHAPES, Outcome, Overload
from tests.support.core.share_world import run_world
from tests.support.core.simulation import simulate
from tests.support.core.victim_check import check_victims

Mutation = Callable[[pytest.MonkeyPatch], None]


def last_in_order(candidates: list[Sequence], cache: KVCache, policy: Policy) -> Sequence:
    """Returns the victim by the order that was used before: tenant, then the last in the policy's order."""
    return max(candidates, key=lambda s: (s.account.terms.priority, s.account.level, policy.order(s)))


def run(shape: str, seeds: Iterable[int]) -> list[Outcome]:
    outcomes = []
    for seed in seeds:
        world = Overload(SHAPES[shape], seed)
        check_victims(world.scheduler)
        outcomes.append(world.run())
    return outcomes


def run_without_costs(patch: pytest.MonkeyPatch, shape: str, seeds: Iterable[int]) -> list[Outcome]:
    with patch.context() as patched:
        patched.setattr(victims, "_choose", last_in_order)
        return [Overload(SHAPES[shape], seed).run() for seed in seeds]


def recomputed(outcomes: list[Outcome]) -> int:
    return sum(outcome.num_recomputed for outcome in outcomes)


def compare(patch: pytest.MonkeyPatch, seeds: Mapping[str, range]) -> dict[str, tuple[int, int]]:
    """Returns the recomputed tokens of each shape: by cost, and in the order that was used before."""
    return {
        shape: (recomputed(run(shape, some)), recomputed(run_without_costs(patch, shape, some)))
        for shape, some in seeds.items()
    }


def total_ratio(tokens: dict[str, tuple[int, int]]) -> float:
    return sum(new for new, _ in tokens.values()) / sum(old for _, old in tokens.values())


def test_under_overload_fewer_tokens_are_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert total_ratio(compare(monkeypatch, dict.fromkeys(SHAPES, range(2)))) <= 0.95


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_no_shape_of_overload_recomputes_many_more_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pool of four or five sequences the choice is small: there 8 % more tokens are recomputed (12 seeds)."""
    # The two shapes whose ratio is nearest to its limit, and differs most from seed to seed, need more of them.
    more = dict.fromkeys(("small pool", "some long prompts"), range(12))
    tokens = compare(monkeypatch, dict.fromkeys(SHAPES, range(6)) | more)
    assert total_ratio(tokens) <= 0.9
    assert all(new <= 1.1 * old for new, old in tokens.values()), tokens
    for shape in ("mixed, no prefix cache", "some long prompts", "samples, no prefix cache", "shared heads"):
        assert tokens[shape][0] <= 0.9 * tokens[shape][1], tokens


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_a_sequence_whose_blocks_others_hold_is_spared_if_it_cannot_find_them_again(
    *, enable_prefix_caching: bool
) -> None:
    """The samples of a request share 20 of their blocks; the other sequence holds as many tokens by itself."""
    scheduler = Scheduler(
        SchedulerLimits(8, 512, 400), num_blocks=60, block_size=4, enable_prefix_caching=enable_prefix_caching
    )
    scheduler.executor_attached(1, 60)
    for request_id, num_samples in ((1, 1), (2, 1), (3, 3)):
        prompt = [request_id] * (20 if request_id == 1 else 80)
        params = SequenceParams(max_total_tokens=200)
        scheduler.add(Request(request_id, prompt, params, seeds=tuple(range(num_samples))))
    while not scheduler.state.counters.num_preemptions:
        plan = scheduler.schedule()
        assert plan is not None
        num_sampled = len(scheduler.state.in_flight[-1].sampled)
        scheduler.commit(StepResult(1, plan.step_id, list(range(num_sampled))))
    (victim,) = scheduler.state.waiting
    assert victim.request.request_id == (3 if enable_prefix_caching else 2)


# --- mutations ------------------------------------------------------------------------------------------------


def ignore_the_cost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(victims, "_cost", lambda sequence, cache: (0, 0))


def prefer_the_longest(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(victims, "_cost", lambda sequence, cache: (1, -sequence.num_computed_tokens))


def ignore_shares(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(victims, "_standing", lambda sequence, policy: policy.rank(sequence.request.priority))


def ignore_ranks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(victims, "_standing", lambda s, policy: (s.account.terms.priority, s.account.level, s.account.name))


def choose_the_oldest(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(victims, "_choose", lambda candidates, cache, policy: min(candidates, key=policy.order))


def run_worlds() -> None:
    """Runs worlds that check each victim.

    Without a mutation, three tests run the same worlds: of overload in this file, of the gap in test_shares.py, and of
    simulated worlds in test_simulation.py.
    """
    for seed in range(12):
        run_world(seed, 400)
    for seed in range(60):
        simulate(seed)
    for shape in sorted(SHAPES, key=lambda name: name != "priorities"):  # the quickest to find most mutations
        run(shape, range(1))


@pytest.mark.parametrize(
    ("mutate", "finding"),
    [
        (ignore_the_cost, "costs more"),
        (prefer_the_longest, "costs more"),
        (ignore_shares, "not of the tenant with the most service"),
        (ignore_ranks, "more urgent"),
        (choose_the_oldest, "first in order"),
    ],
)
def test_each_mutation_is_found(monkeypatch: pytest.MonkeyPatch, mutate: Mutation, finding: str) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match=f"I23: .*{finding}"):
        run_worlds()
