"""Blocks count as written only where the device has written them, although the host learns late that sequences end.

The sequence of these tests ends with its first token, at 5 of the 8 tokens of blocks 1 and 2. More steps are launched
before its result is known; their rows write to the null block.
"""

from __future__ import annotations

import pytest

from executor.errors import PlanRejected
from executor.plans.plan import Admission, Fork, Publication, SequenceParams, StepPlan
from quire.plan_stream import DIGEST_BYTES
from tests.support.cuda.comparison import _counts
from tests.support.executor.plan_driver import generate, ints, tuples

SCHEME = "a scheme"
NUM_OVERRUNS = 3


def published(*blocks: int) -> Publication:
    return Publication(ints(*blocks), bytes(len(blocks) * DIGEST_BYTES))


def first_plan(both, prompt: list[int], *, ends: bool) -> StepPlan:
    eos = ints(*generate(both.reference, [prompt], 1)[0]) if ends else ints()
    params = SequenceParams(max_total_tokens=20, num_prompt_tokens=5, eos_token_ids=eos)
    admission = Admission(0, ints(*prompt), 0, ints(1, 2), params)
    return StepPlan(1, 1, admissions=(admission,), row_counts=tuples(2, (0, 5)))


def launch(both, prompt: list[int], *, ends: bool, forks: tuple[Fork, ...] = ()) -> int:
    """Launches the first step and three more without waiting for results; returns the id of the last."""
    runner = both.cuda
    runner.reset(SCHEME)
    runner.execute(first_plan(both, prompt, ends=ends))
    for step_id in range(2, 2 + NUM_OVERRUNS):
        runner.execute(StepPlan(1, step_id, row_counts=_counts(step_id), forks=forks if step_id == 2 else ()))
    return 1 + NUM_OVERRUNS


@pytest.fixture
def both(pair):
    return pair("llama")


@pytest.fixture
def prompt(checkpoint) -> list[int]:
    return checkpoint("llama").prompt(5)


def test_a_block_that_a_sequence_fills_can_be_published(both, prompt) -> None:
    last = launch(both, prompt, ends=False)
    both.cuda.execute(StepPlan(1, last + 1, published=published(1, 2), row_counts=tuples(2, (0, 0))))
    assert both.cuda.reset(SCHEME).blocks.tolist() == [1, 2]


@pytest.mark.parametrize("retired", [(), (0,)])
def test_overrun_rows_do_not_fill_a_block(both, prompt, retired) -> None:
    last = launch(both, prompt, ends=True)
    with pytest.raises(PlanRejected, match="has not written all of block 2"):
        both.cuda.execute(StepPlan(1, last + 1, retired_slots=ints(*retired), published=published(1, 2)))
    both.cuda.execute(StepPlan(1, last + 1, retired_slots=ints(*retired), published=published(1)))
    assert both.cuda.reset(SCHEME).blocks.tolist() == [1]


def test_overrun_rows_do_not_count_after_the_slot_is_retired(both, prompt) -> None:
    """The slot is retired while the host knows none of the results, by which its end would be learned too late."""
    last = launch(both, prompt, ends=True)
    both.cuda.execute(StepPlan(1, last + 1, retired_slots=ints(0)))
    with pytest.raises(PlanRejected, match="has not written all of block 2"):
        both.cuda.execute(StepPlan(1, last + 2, published=published(2)))
    for num_computed, is_fine in ((6, False), (5, True)):
        params = SequenceParams(max_total_tokens=20)
        theft = Admission(1, ints(*prompt, 7, 8), num_computed, ints(1, 2), params)
        plan = StepPlan(1, last + 2, admissions=(theft,))
        if is_fine:
            both.cuda.execute(plan)
        else:
            with pytest.raises(PlanRejected, match="this lease has not written its first 2 tokens"):
                both.cuda.execute(plan)


def test_the_fork_of_an_ended_sequence_fills_no_block(both, prompt) -> None:
    last = launch(both, prompt, ends=True, forks=(Fork(0, 1, 3),))
    both.cuda.execute(StepPlan(1, last + 1, retired_slots=ints(0, 1)))
    with pytest.raises(PlanRejected, match="has not written all of block 2"):
        both.cuda.execute(StepPlan(1, last + 2, published=published(2)))


@pytest.mark.parametrize("num_forks", [1, 3])
@pytest.mark.parametrize("knows_results", [False, True])
def test_no_token_of_a_fork_of_an_ended_sequence_counts(both, prompt, num_forks: int, knows_results: bool) -> None:
    """Each fork takes a row of its parent over that the device has written to the null block."""
    runner = both.cuda
    runner.reset(SCHEME)
    runner.execute(first_plan(both, prompt, ends=True))
    third = {"table_updates": tuples(3, (0, 2, 3)), "row_counts": _counts(2)}
    for parent in range(num_forks):
        runner.execute(StepPlan(1, 2 + parent, forks=(Fork(parent, parent + 1, 3),), **(third if not parent else {})))
    if knows_results:
        for launched in runner._launched:
            launched.finish()
    runner.execute(StepPlan(1, 2 + num_forks, retired_slots=ints(0)))
    for num_computed in range(6, 10):
        params = SequenceParams(max_total_tokens=20)
        theft = Admission(num_forks + 1, ints(*range(1, num_computed + 2)), num_computed, ints(1, 2, 3), params)
        with pytest.raises(PlanRejected, match="has not written"):
            runner.execute(StepPlan(1, 3 + num_forks, admissions=(theft,)))


def test_a_step_that_fails_on_the_device_leaves_no_retained_blocks(both, prompt) -> None:
    last = launch(both, prompt, ends=False)
    both.cuda.execute(StepPlan(1, last + 1, published=published(1, 2), row_counts=tuples(2, (0, 0))))
    launched = both.cuda._launched[-1]

    def fail() -> None:
        raise RuntimeError("the device failed")

    launched._read = fail  # type: ignore[method-assign]
    assert not both.cuda.reset(SCHEME).blocks.size
    assert not both.cuda.reset(SCHEME).blocks.size
