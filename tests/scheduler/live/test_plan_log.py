"""The log of plans against the executor's own picture of its slots, step by step."""

import random

from scheduler.core import BeamParams, Request, Scheduler, SchedulerLimits, SequenceParams
from scheduler.live.plan_log import MAX_STEPS, LoggedStep, PlanLog, Rows
from tests.support.core.fake_executor import FakeExecutor


class Bench:
    """A core with a fake executor: one step after the other, all of them logged."""

    def __init__(self, num_blocks: int = 60) -> None:
        self.core = Scheduler(
            SchedulerLimits(max_num_seqs=6, max_num_batched_tokens=16, max_model_len=64),
            num_blocks=num_blocks,
            block_size=4,
        )
        self.core.executor_attached(1, num_blocks)
        self.executor = FakeExecutor(num_blocks, 4, 6, 16, 50, 1)
        self.log = PlanLog()
        self.num_requests = 0

    def add(self, num_prompt_tokens: int, max_tokens: int, n: int = 1, beam: BeamParams | None = None) -> None:
        self.num_requests += 1
        # Prompts of its own, lest a prefix hit makes them short.
        prompt = [(self.num_requests * 7 + i) % 50 for i in range(num_prompt_tokens)]
        params = SequenceParams(max_total_tokens=num_prompt_tokens + max_tokens)
        self.core.add(Request(self.num_requests, prompt, params, seeds=tuple(range(n)), beam=beam))

    def step(self) -> bool:
        plan = self.core.schedule()
        if plan is None:
            return False
        self.log.planned(self.core, plan)
        self.core.commit(self.executor.execute(plan))
        return True

    def executor_rows(self) -> dict[int, int]:
        return {slot: found.row_count for slot, found in self.executor.slots.items()}


def counts(rows: Rows) -> dict[int, int]:
    return {slot: num_tokens for slot, (_, num_tokens) in rows.items()}


def computed(step: LoggedStep, before: Rows) -> Rows:
    """Who computes how much in a step, and who nothing."""
    rows = dict(before)
    step._replace(forked=(), paused=()).apply(rows)
    return rows


def test_rows_are_those_of_the_executor_through_chunks_forks_beams_and_preemptions() -> None:
    bench = Bench(num_blocks=28)
    bench.log.watch(bench.core)
    numbers = random.Random(5)
    num_forks = num_beams = 0
    for _ in range(600):
        if numbers.random() < 0.3 and bench.core.num_waiting < 4:
            beam = BeamParams(3, 1) if numbers.random() < 0.3 else None
            n = 1 if beam else numbers.choice((1, 1, 2))
            bench.add(numbers.randint(1, 30), numbers.randint(2, 20), n, beam)
        before = dict(bench.log.rows)
        if bench.step():
            lost_rows, (step,) = bench.log.take()
            assert lost_rows is None
            num_forks += len(step.forked)
            num_beams += len(step.paused)
            assert counts(bench.log.rows) == bench.executor_rows()
            assert step.num_tokens == bench.executor.num_tokens == sum(counts(computed(step, before)).values())
    assert bench.core.state.counters.num_preemptions > 0
    assert num_forks > 0
    assert num_beams > 0


def test_beams_compute_a_token_when_they_branch_and_nothing_while_they_wait() -> None:
    """A prompt in two chunks that are alike, beside a decode; then two beams, which the first one's slot and one more
    hold. Steps of the decode alone come in between: a beam waits for the result of its last step."""
    bench = Bench()
    bench.log.watch(bench.core)
    bench.add(1, 20)
    bench.step()
    bench.add(30, 4, beam=BeamParams(2, 1))
    seen = list[Rows]()
    for _ in range(4):
        bench.step()
    for _ in range(2):  # two plans in flight
        plan = bench.core.schedule()
        assert plan is not None
        bench.log.planned(bench.core, plan)
    rows: Rows = {}
    for step in bench.log.take()[1]:
        seen.append({slot: row for slot, row in computed(step, rows).items() if row[1]})
        step.apply(rows)
    decode = {0: ("1.0", 1)}
    assert seen == [
        decode,
        decode | {1: ("2.0", 15)},
        decode | {1: ("2.0", 15)},
        decode | {1: ("2.0", 1), 2: ("2.1", 1)},
        decode | {1: ("2.0", 1), 2: ("2.1", 1)},
        decode | {1: ("2.0", 1), 2: ("2.1", 1)},
        decode,
    ]


def test_watching_begins_among_beams() -> None:
    for num_steps in range(1, 6):
        bench = Bench()
        bench.add(30, 6, beam=BeamParams(2, 1))
        for _ in range(num_steps):
            bench.step()
        bench.log.watch(bench.core)
        assert counts(bench.log.rows) == {s: n for s, n in bench.executor_rows().items() if s in bench.log.rows}
        bench.step()
        bench.log.take()
        assert counts(bench.log.rows) == bench.executor_rows()


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
    while bench.core.state.counters.num_steps < MAX_STEPS + 40:
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


def test_of_another_core_the_rows_are_told_before_its_next_step() -> None:
    """An engine that began anew: what the log knew was of the core that it gave up."""
    old, new = Bench(), Bench()
    old.log.watch(old.core)
    old.add(3, 9)
    old.step()
    new.log = old.log
    new.add(5, 9)
    new.step()
    new.step()
    rows, (step,) = new.log.take()
    assert rows is not None
    assert (counts(rows), step.step_id) == ({0: 5}, 2)
    assert counts(new.log.rows) == new.executor_rows() == {0: 1}
