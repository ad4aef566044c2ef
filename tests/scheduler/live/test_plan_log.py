"""Compares the log of plans with the executor's own slots, step by step."""

import random

from scheduler.core import BeamParams, Request, Scheduler, SchedulerLimits, SequenceParams
from scheduler.live.plan_log import MAX_STEPS, LoggedStep, PlanLog, Rows
from tests.support.core.fake_executor import FakeExecutor


class LoggedCore:
    """A core with a fake executor, which runs one step after the other and logs each of them."""

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
        # Each request has another prompt, so that no prefix hit shortens it.
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
    """Returns the tokens that each slot computes in a step, including zeros."""
    rows = dict(before)
    step._replace(forked=(), paused=()).apply(rows)
    return rows


def test_rows_equal_those_of_the_executor_with_chunks_forks_beams_and_preemptions() -> None:
    logged = LoggedCore(num_blocks=28)
    logged.log.watch(logged.core)
    numbers = random.Random(5)
    num_forks = num_beams = 0
    for _ in range(600):
        if numbers.random() < 0.3 and logged.core.num_waiting < 4:
            beam = BeamParams(3, 1) if numbers.random() < 0.3 else None
            n = 1 if beam else numbers.choice((1, 1, 2))
            logged.add(numbers.randint(1, 30), numbers.randint(2, 20), n, beam)
        before = dict(logged.log.rows)
        if logged.step():
            lost_rows, (step,) = logged.log.take()
            assert lost_rows is None
            num_forks += len(step.forked)
            num_beams += len(step.paused)
            assert counts(logged.log.rows) == logged.executor_rows()
            assert step.num_tokens == logged.executor.num_tokens == sum(counts(computed(step, before)).values())
    assert logged.core.state.counters.num_preemptions > 0
    assert num_forks > 0
    assert num_beams > 0


def test_beams_compute_a_token_when_they_branch_and_nothing_while_they_wait() -> None:
    """A prompt in two equal chunks runs beside a decode, and becomes two beams in its own slot and one more.

    Steps with the decode alone come in between, because a beam waits for the result of its last step.
    """
    logged = LoggedCore()
    logged.log.watch(logged.core)
    logged.add(1, 20)
    logged.step()
    logged.add(30, 4, beam=BeamParams(2, 1))
    seen = list[Rows]()
    for _ in range(4):
        logged.step()
    for _ in range(2):  # two plans in flight
        plan = logged.core.schedule()
        assert plan is not None
        logged.log.planned(logged.core, plan)
    rows: Rows = {}
    for step in logged.log.take()[1]:
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


def test_watching_can_begin_during_a_beam_search() -> None:
    for num_steps in range(1, 6):
        logged = LoggedCore()
        logged.add(30, 6, beam=BeamParams(2, 1))
        for _ in range(num_steps):
            logged.step()
        logged.log.watch(logged.core)
        assert counts(logged.log.rows) == {s: n for s, n in logged.executor_rows().items() if s in logged.log.rows}
        logged.step()
        logged.log.take()
        assert counts(logged.log.rows) == logged.executor_rows()


def test_rows_name_the_sequence_of_each_slot() -> None:
    logged = LoggedCore()
    logged.log.watch(logged.core)
    logged.add(5, 4, n=2)
    logged.step()
    assert logged.log.take()[1][0].entered == [(0, "1.0")]
    assert logged.log.rows == {0: ("1.0", 5), 1: ("1.1", 1)}
    logged.step()
    logged.log.take()
    assert logged.log.rows == {0: ("1.0", 1), 1: ("1.1", 1)}


def test_a_sequence_that_ends_in_its_first_step_is_logged() -> None:
    logged = LoggedCore()
    logged.log.watch(logged.core)
    logged.add(5, 1)
    logged.step()
    (step,) = logged.log.take()[1]
    assert (step.entered, step.row_counts) == ([(0, "1.0")], [0, 5])


def test_watching_can_begin_while_sequences_run() -> None:
    logged = LoggedCore()
    logged.add(5, 20, n=2)
    for _ in range(4):
        logged.step()
    assert logged.log.take() == (None, [])
    logged.log.watch(logged.core)
    assert logged.log.rows == {0: ("1.0", 1), 1: ("1.1", 1)}
    logged.step()
    assert len(logged.log.take()[1]) == 1


def test_nothing_is_logged_while_the_log_is_not_watched() -> None:
    logged = LoggedCore()
    logged.add(5, 20)
    logged.log.watch(logged.core)
    logged.step()
    logged.log.unwatch()
    logged.step()
    assert logged.log.take() == (None, [])
    assert logged.log.rows == {}


def test_the_oldest_of_too_many_steps_are_dropped_and_the_rows_after_them_are_returned() -> None:
    logged = LoggedCore(num_blocks=400)
    logged.log.watch(logged.core)
    while logged.core.state.counters.num_steps < MAX_STEPS + 40:
        if not logged.core.num_unfinished_requests:
            logged.add(5, 30)
        logged.step()
    rows, steps = logged.log.take()
    assert rows is not None
    assert [step.step_id for step in steps] == list(range(41, MAX_STEPS + 41))
    for step in steps:
        step.apply(rows)
    assert counts(rows) == logged.executor_rows()


def test_a_new_epoch_begins_with_empty_slots() -> None:
    logged = LoggedCore()
    logged.log.watch(logged.core)
    logged.add(5, 20, n=2)
    logged.step()
    logged.core.executor_lost()
    logged.core.executor_attached(2, 60)
    logged.executor = FakeExecutor(60, 4, 6, 16, 50, 2)
    logged.step()
    logged.log.take()
    assert counts(logged.log.rows) == logged.executor_rows()


def test_the_rows_of_another_core_are_returned_before_its_next_step() -> None:
    """The engine replaces its core; the log still has the rows of the old one."""
    old, new = LoggedCore(), LoggedCore()
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
