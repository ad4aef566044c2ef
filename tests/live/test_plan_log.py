"""The log of plans against the executor's own picture of its slots, step by step."""

import random

from scheduler.core import Limits, Request, Scheduler, SequenceParams
from scheduler.live.plan_log import MAX_STEPS, PlanLog, Rows
from tests.core.fake_executor import FakeExecutor


class Bench:
    """A core with a fake executor: one step after the other, all of them logged."""

    def __init__(self, num_blocks: int = 60) -> None:
        self.core = Scheduler(
            Limits(max_num_seqs=6, max_num_batched_tokens=16, max_model_len=64), num_blocks=num_blocks, block_size=4
        )
        self.core.executor_attached(1, num_blocks)
        self.executor = FakeExecutor(num_blocks, 4, 6, 16, 50, 1)
        self.log = PlanLog()
        self.num_requests = 0

    def add(self, num_prompt_tokens: int, max_tokens: int, n: int = 1) -> None:
        self.num_requests += 1
        # Prompts of its own, lest a prefix hit makes them short.
        prompt = [(self.num_requests * 7 + i) % 50 for i in range(num_prompt_tokens)]
        params = SequenceParams(max_total_tokens=num_prompt_tokens + max_tokens)
        self.core.add(Request(self.num_requests, prompt, params, seeds=tuple(range(n))))

    def step(self) -> bool:
        plan = self.core.schedule()
        if plan is None:
            return False
        self.log.planned(plan)
        self.core.commit(self.executor.execute(plan))
        return True

    def executor_rows(self) -> dict[int, int]:
        return {slot: found.row_count for slot, found in self.executor.slots.items()}


def counts(rows: Rows) -> dict[int, int]:
    return {slot: num_tokens for slot, (_, num_tokens) in rows.items()}


def test_rows_are_those_of_the_executor_through_chunks_forks_and_preemptions() -> None:
    bench = Bench(num_blocks=24)
    bench.log.watch(bench.core)
    numbers = random.Random(5)
    num_forks = 0
    for _ in range(300):
        if numbers.random() < 0.3 and bench.core.num_waiting < 4:
            bench.add(numbers.randint(1, 30), numbers.randint(2, 20), n=numbers.choice((1, 1, 2)))
        if bench.step():
            lost_rows, (step,) = bench.log.take()
            assert lost_rows is None
            num_forks += len(step.forked)
            assert counts(bench.log.rows) == bench.executor_rows()
            assert step.num_tokens == bench.executor.num_tokens
    assert bench.core.counters.num_preemptions > 0
    assert num_forks > 0


def test_who_is_in_a_slot() -> None:
    bench = Bench()
    bench.log.watch(bench.core)
    bench.add(5, 4, n=2)
    bench.step()
    assert bench.log.take()[1][0].entered == [(0, "1.0")]
    assert bench.log.rows == {0: ("1.0", 5), 1: ("1.1", 1)}
    bench.step()
    bench.log.take()
    assert bench.log.rows == {0: ("1.0", 1), 1: ("1.1", 1)}


def test_a_sequence_that_ends_in_its_first_step_is_seen() -> None:
    bench = Bench()
    bench.log.watch(bench.core)
    bench.add(5, 1)
    bench.step()
    (step,) = bench.log.take()[1]
    assert (step.entered, step.row_counts) == ([(0, "1.0")], [0, 5])


def test_watching_begins_in_the_middle() -> None:
    bench = Bench()
    bench.add(5, 20, n=2)
    for _ in range(4):
        bench.step()
    assert bench.log.take() == (None, [])
    bench.log.watch(bench.core)
    assert bench.log.rows == {0: ("1.0", 1), 1: ("1.1", 1)}
    bench.step()
    assert len(bench.log.take()[1]) == 1


def test_nothing_is_kept_for_nobody() -> None:
    bench = Bench()
    bench.add(5, 20)
    bench.log.watch(bench.core)
    bench.step()
    bench.log.unwatch()
    bench.step()
    assert bench.log.take() == (None, [])
    assert bench.log.rows == {}


def test_of_too_many_steps_the_oldest_are_lost_and_the_rows_before_the_rest_are_told() -> None:
    bench = Bench(num_blocks=400)
    bench.log.watch(bench.core)
    while bench.core.counters.num_steps < MAX_STEPS + 40:
        if not bench.core.num_unfinished_requests:
            bench.add(5, 30)
        bench.step()
    rows, steps = bench.log.take()
    assert rows is not None
    assert [step.step_id for step in steps] == list(range(41, MAX_STEPS + 41))
    for step in steps:
        step.apply(rows)
    assert counts(rows) == bench.executor_rows()


def test_a_new_epoch_begins_with_empty_slots() -> None:
    bench = Bench()
    bench.log.watch(bench.core)
    bench.add(5, 20, n=2)
    bench.step()
    bench.core.executor_lost()
    bench.core.executor_attached(2, 60)
    bench.executor = FakeExecutor(60, 4, 6, 16, 50, 2)
    bench.step()
    bench.log.take()
    assert counts(bench.log.rows) == bench.executor_rows()
