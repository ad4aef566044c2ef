"""I26: the short prompt of a tenant that has nothing in the batch passes before a step that takes much longer."""

from collections.abc import Callable
from random import Random

import pytest

from scheduler.core import (
    Request,
    Scheduler,
    SchedulerLimits,
    SchedulerState,
    SequenceParams,
    StepCosts,
    StepResult,
    planning,
)
from scheduler.core.fairness.fair_queue import FairQueue
from scheduler.core.fairness.newcomers import MAX_SHARE
from scheduler.core.sequence import Sequence
from scheduler.core.step import StepBuilder
from tests.support.core.harness import Harness
from tests.support.core.letter_tokens import VOCAB_SIZE, make_request
from tests.support.core.shares import limits, request, scheduler_of, step

COSTS = StepCosts(step_s=0.1, decode_s=1.0, token_s=0.1)
"""A step of eight decodes takes 8.1 s, and a prompt of four tokens 0.5 s."""

BLOCK_SIZE = 4
"""The tokens of a block of the schedulers that `scheduler_of` returns."""


def busy(
    costs: StepCosts = COSTS, *, num_requests: int = 4, prompt: int = 4, output: int = 300, num_blocks: int = 10_000
) -> Scheduler:
    """Returns a scheduler of eight slots in which one tenant decodes, and whose last step is committed."""
    scheduler = scheduler_of(limits(max_num_batched_tokens=256), num_blocks)
    for number in range(num_requests):
        scheduler.add(request(number, "greedy", prompt=prompt, output=output))
    for _ in range(3):
        step(scheduler)
    scheduler.set_costs(costs)
    return scheduler


def test_a_newcomer_gets_its_token_in_a_step_of_its_own_and_then_all_go_on() -> None:
    scheduler = busy()
    scheduler.add(request(100, "modest", output=3))
    assert step(scheduler) == ["modest"]
    assert step(scheduler) == ["greedy"] * 4 + ["modest"]
    assert step(scheduler) == ["greedy"] * 4 + ["modest"]


def test_the_samples_of_a_newcomer_begin_in_the_same_step() -> None:
    scheduler = busy()
    scheduler.add(request(100, "modest", n=3))
    assert step(scheduler) == ["modest"] * 3
    assert step(scheduler) == ["greedy"] * 4 + ["modest"] * 3


@pytest.mark.parametrize(("prompt", "num_sequences"), [(BLOCK_SIZE, 1), (BLOCK_SIZE + 1, 5)])
def test_samples_that_have_to_copy_a_block_first_do_not_pause(prompt: int, num_sequences: int) -> None:
    scheduler = scheduler_of(limits(max_num_batched_tokens=256))
    scheduler.set_costs(COSTS)
    scheduler.add(request(1, "greedy", prompt=prompt, n=4, output=300))
    assert scheduler.schedule() is not None
    scheduler.add(request(100, "modest"))
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.num_sequences == num_sequences


def test_a_newcomer_leaves_their_next_blocks_to_the_decodes_that_pause() -> None:
    """It reserves all the blocks that are free. If it passed, a sample would be preempted for lack of one."""
    scheduler = scheduler_of(limits(max_in_flight=1, max_num_batched_tokens=256, max_preemptions=0), 41)
    scheduler.add(request(1, "greedy", prompt=5, output=55, n=2))
    decoding = scheduler.state.batch.decoding
    while not decoding or decoding[0].num_planned_tokens % BLOCK_SIZE:
        step(scheduler)
    scheduler.set_costs(COSTS)
    num_free = scheduler.state.cache.num_available_blocks()
    scheduler.add(request(100, "modest", prompt=3, output=num_free * BLOCK_SIZE - 2))
    assert step(scheduler) == ["greedy"] * 2
    assert step(scheduler) == ["greedy"] * 2
    assert scheduler.state.counters.num_preemptions == 0


def test_a_newcomer_passes_before_the_next_piece_of_a_long_prompt() -> None:
    scheduler = scheduler_of(limits(max_num_batched_tokens=64))
    scheduler.set_costs(COSTS)
    scheduler.add(request(1, "greedy", prompt=300))
    assert step(scheduler) == []
    scheduler.add(request(100, "modest"))
    assert step(scheduler) == ["modest"]
    assert scheduler.schedule() is not None
    assert sum(scheduler.state.in_flight[-1].prefills.values()) == 63, "the prompt goes on beside the newcomer's decode"


def test_the_result_of_a_step_before_the_pause_may_come_after_it_was_planned() -> None:
    scheduler = busy()
    before = scheduler.schedule()
    scheduler.add(request(100, "modest"))
    alone = scheduler.schedule()
    assert before is not None
    assert alone is not None
    assert (before.num_sequences, alone.num_sequences) == (4, 1)
    scheduler.commit(StepResult(before.epoch, before.step_id, [7] * 4))
    scheduler.commit(StepResult(alone.epoch, alone.step_id, [7]))
    assert step(scheduler) == ["greedy"] * 4 + ["modest"]


@pytest.mark.parametrize(
    ("costs", "why"),
    [
        (StepCosts(), "nothing is known of the costs"),
        (StepCosts(step_s=8.0, decode_s=0.01, token_s=0.01), "a step costs the same for one sequence and for many"),
        (StepCosts(step_s=0.1, decode_s=0.1, token_s=0.1), "the prompt takes as long as the decodes"),
    ],
)
def test_no_newcomer_passes_if_it_would_gain_little(costs: StepCosts, why: str) -> None:
    scheduler = busy(costs)
    scheduler.add(request(100, "modest"))
    assert step(scheduler) == ["greedy"] * 4 + ["modest"], why


def test_the_time_of_a_newcomer_is_at_most_a_part_of_the_step_that_it_delays() -> None:
    decodes_s = COSTS.decodes_s(4, 0)
    num_within = int((MAX_SHARE * decodes_s - COSTS.step_s) / COSTS.token_s)
    for num_tokens, passes in ((num_within, True), (num_within + 1, False)):
        scheduler = busy()
        scheduler.add(Request(100, [2] * num_tokens, SequenceParams(max_total_tokens=40), tenant="modest"))
        assert (step(scheduler) == ["modest"]) is passes


def test_cached_tokens_of_a_prompt_take_no_time() -> None:
    scheduler = busy()
    scheduler.add(request(100, "modest", prompt=41))
    while "modest" not in step(scheduler):
        pass
    scheduler.cancel(100)
    step(scheduler)
    scheduler.add(request(101, "modest", prompt=41))
    assert step(scheduler) == ["modest"]


def test_a_tenant_that_has_a_sequence_in_the_batch_is_no_newcomer() -> None:
    scheduler = busy()
    scheduler.add(request(100, "modest", output=300))
    step(scheduler)
    step(scheduler)
    scheduler.add(request(101, "modest"))
    assert step(scheduler) == ["greedy"] * 4 + ["modest"] * 2


def test_a_tenant_alone_is_scheduled_as_ever() -> None:
    scheduler = busy()
    scheduler.add(request(100, "greedy"))
    assert step(scheduler) == ["greedy"] * 5


def test_the_batch_does_not_pause_twice_in_a_row() -> None:
    scheduler = busy(num_requests=2)
    for number in range(4):
        scheduler.add(request(100 + number, f"t{number}"))
    first, second = step(scheduler), step(scheduler)
    assert (first, second[:2]) == (["t0"], ["greedy"] * 2)


def test_a_newcomer_leaves_decodes_the_blocks_for_their_next_tokens() -> None:
    """One decode needs a block for its next token, and one block is left."""
    scheduler = busy(prompt=6, output=18, num_blocks=7)
    assert scheduler.state.cache.pool.num_free_blocks == 1
    scheduler.add(request(100, "modest"))
    assert step(scheduler) == ["greedy"] * 4


# --- worlds -----------------------------------------------------------------------------------------------------------


def simulate(seed: int) -> Harness:
    """Runs requests of four tenants with random costs, every plan checked, and each token compared."""
    rng = Random(seed)
    bounds = SchedulerLimits(rng.randint(2, 6), rng.randint(6, 24), 60, max_in_flight=rng.randint(1, 3))
    harness = Harness(bounds, num_blocks=rng.randint(18, 60), block_size=rng.choice([2, 4]), vocab_size=VOCAB_SIZE)
    harness.attach()
    open_requests: list[int] = []
    for number in range(120):
        match rng.choices(["add", "schedule", "commit", "costs", "cancel", "lose"], [3, 6, 5, 1, 0.5, 0.2])[0]:
            case "add":
                prompt = "".join(rng.choices("ab", k=rng.randint(1, 12)))
                seeds = tuple(range(rng.choice([1, 1, 1, 2])))
                tenant = rng.choice(["a", "a", "a", "b", "c", "d"])
                harness.add(make_request(number, prompt, rng.randint(1, 12), seeds=seeds, tenant=tenant))
                open_requests.append(number)
            case "schedule":
                harness.schedule()
            case "commit" if harness.in_flight:
                harness.commit()
            case "costs":
                values = (rng.choice([0.0, 0.1, 1.0]), rng.choice([0.1, 1.0]), 0.01, rng.choice([0.01, 0.1]), 0.0, 0.0)
                harness.scheduler.set_costs(StepCosts(*values))
            case "cancel" if open_requests:
                harness.cancel(open_requests.pop(rng.randrange(len(open_requests))))
            case "lose" if harness.executor:
                harness.lose()
                harness.attach()
    harness.run()
    return harness


def simulate_worlds() -> int:
    """Returns how often the batch paused."""
    return sum(simulate(seed).coverage.num_pauses for seed in range(60))


def test_newcomers_change_no_token_and_break_no_invariant() -> None:
    assert simulate_worlds() > 60


def pause_again_and_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FairQueue, "paused_step_id", property(lambda queue: -1, lambda queue, step_id: None), raising=False)


def resume_the_newcomer_only(patch: pytest.MonkeyPatch) -> None:
    let_pass = planning._let_newcomer_pass

    def mutant(state: SchedulerState, builder: StepBuilder, growing: list[Sequence]) -> bool:
        passes = let_pass(state, builder, growing)
        if passes:
            state.batch.joined = [sequence for sequence in state.batch.joined if sequence.row_count]
        return passes

    patch.setattr(planning, "_let_newcomer_pass", mutant)


def let_everyone_pass(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("scheduler.core.planning.may_pass", lambda newcomer, prefix, batch, *_: bool(batch.running))


@pytest.mark.parametrize(
    ("mutate", "finding"),
    [
        (pause_again_and_again, "I26: slots .* pause twice"),
        (resume_the_newcomer_only, "I26: slots|more tokens to compute than are known"),
        (let_everyone_pass, "I15: slots|I13"),
    ],
)
def test_each_mutation_is_found(
    monkeypatch: pytest.MonkeyPatch, mutate: Callable[[pytest.MonkeyPatch], None], finding: str
) -> None:
    mutate(monkeypatch)
    with pytest.raises(Exception, match=finding):
        simulate_worlds()
