"""Slots and blocks: sharing, forking, copying, overrunning and reuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from executor.plans.plan import EndReason, Fork, StepPlan
from tests.support.executor.plan_driver import LogitsRecorder, PlanDriver, ints, tuples


@pytest.fixture
def source(checkpoint):
    return checkpoint("llama")


@pytest.fixture(params=["reference", "auto"])
def runner(request, source, make_runner):
    return make_runner(source.directory, kernels=request.param)


def test_a_cached_prefix_is_not_computed_again(source, runner) -> None:
    prompt = source.prompt(21)
    driver = PlanDriver(runner)
    first = driver.admit(prompt, 6)
    driver.step()
    second = driver.admit(prompt[:18] + source.prompt(3, seed=1), 6, prefix=first.block_table[:4])
    before = runner.model.pool[:, first.block_table[:4]].clone()
    driver.run()
    assert first.output == source.greedy(prompt, 6)
    assert second.output == source.greedy(second.tokens[:21], 6)
    assert torch.equal(runner.model.pool[:, first.block_table[:4]], before)


def test_a_cached_prefix_is_read_from_its_blocks(source, runner) -> None:
    """Overwritten blocks of the prefix change the output, so the prefix is read and not computed."""
    prompt = source.prompt(9)
    driver = PlanDriver(runner)
    first = driver.admit(prompt, 1)
    driver.step()
    runner.model.pool[:, first.block_table[0]] = 3.0
    second = driver.admit(prompt, 4, prefix=first.block_table[:2])
    driver.retire(first, keep_blocks=True)
    driver.run()
    assert second.output != source.greedy(prompt, 4)


def test_greedy_children_repeat_their_parent(source, runner) -> None:
    """After the fork, the parent keeps the partly filled block and each child gets a copy."""
    prompt = source.prompt(10)
    driver = PlanDriver(runner)
    parent = driver.admit(prompt, 9)
    slots = driver.free_slots[2:4]
    driver.step(forks=tuple(Fork(parent.slot, slot, seed=slot) for slot in slots))
    children = driver.sequences[1:]
    copies = []
    for child in children:
        copies.append((child.block_table[-1], driver.free_blocks.pop(0)))
        child.block_table[-1] = copies[-1][1]
    updates = [(child.slot, 2, child.block_table[-1]) for child in children]
    driver.step(copies=tuple(copies), more=StepPlan(0, 0, table_updates=tuples(3, *updates)))
    assert not torch.equal(runner.model.pool[:, copies[0][0]], torch.zeros_like(runner.model.pool[:, copies[0][0]]))
    driver.run()
    assert [sequence.output for sequence in (parent, *children)] == [source.greedy(prompt, 9)] * 3


def test_a_copied_block_does_not_depend_on_its_source(source, runner) -> None:
    """Once a block is copied, its source may hold anything."""
    prompt = source.prompt(10)
    driver = PlanDriver(runner)
    parent = driver.admit(prompt, 9)
    slot = driver.free_slots[2]
    driver.step(forks=(Fork(parent.slot, slot, seed=0),))
    child = driver.sequences[1]
    shared, own = child.block_table[-1], driver.free_blocks.pop(0)
    child.block_table[-1] = own
    update = StepPlan(0, 0, table_updates=tuples(3, (child.slot, 2, own)))
    driver.step(copies=((shared, own),), more=update)
    driver.retire(parent, keep_blocks=True)
    runner.model.pool[:, shared] = float("nan")
    driver.run()
    assert child.output == source.greedy(prompt, 9)


def test_children_sample_with_their_own_seed(source, runner) -> None:
    """A fork gets the same tokens as a separate sequence with its seed."""
    prompt = source.prompt(8)
    outputs = []
    for seed in range(4):
        driver = PlanDriver(runner)
        sequence = driver.admit(prompt, 1, temperature=3.0, seed=seed)
        driver.run()
        outputs.append(sequence.output)
    driver = PlanDriver(runner)
    parent = driver.admit(prompt, 1, temperature=3.0, seed=0)
    driver.step(forks=tuple(Fork(parent.slot, seed, seed=seed) for seed in (3, 1, 2)))
    by_slot = sorted(driver.sequences, key=lambda sequence: sequence.slot)
    assert [sequence.output for sequence in by_slot] == outputs
    assert len({tuple(output) for output in outputs}) > 2


def test_an_ended_slot_is_overrun_until_it_is_retired(source, runner) -> None:
    prompt, other = source.prompt(6), source.prompt(11)
    expected = source.greedy(prompt, 6)
    driver = PlanDriver(runner)
    ending = driver.admit(prompt, 20, eos_token_ids=ints(expected[3]))
    going = driver.admit(other, 12)
    while not ending.reason:
        driver.step()
    assert ending.output[-1] == expected[3]
    assert ending.reason is EndReason.EOS
    recorder = LogitsRecorder(runner)
    pool = runner.model.pool[:, ending.block_table].clone()
    counters = runner.slots.counters.copy()
    for _ in range(2):
        output = driver.step()
        assert output.token_ids[0] == 0
        assert output.end_reasons.tolist() == [0, 0]
    assert torch.equal(runner.model.pool[:, ending.block_table[: pool.shape[1]]], pool)
    for name in ("num_tokens", "num_computed_tokens", "has_ended"):
        assert getattr(runner.slots.counters, name)[ending.slot] == getattr(counters, name)[ending.slot]
    assert len(recorder.last) == 1, "nothing is computed for the ended sequence"
    driver.retire(ending)
    driver.run()
    assert going.output == source.greedy(other, 12)


def test_a_fork_of_an_overrun_slot_is_overrun(source, runner) -> None:
    prompt = source.prompt(5)
    driver = PlanDriver(runner)
    driver.admit(prompt, 20, eos_token_ids=ints(source.greedy(prompt, 1)[0]))
    driver.step()
    output = driver.step(forks=(Fork(0, 3, seed=1),))
    assert output.token_ids.tolist() == [0, 0]
    assert np.flatnonzero(runner.slots.counters.has_ended).tolist() == [0, 3]


@pytest.mark.parametrize(
    ("ends", "reason"),
    [("eos_token_ids", EndReason.EOS), ("stop_token_ids", EndReason.STOP), (None, EndReason.LENGTH)],
)
def test_sequences_end_by_eos_stop_id_or_length(ends, reason, source, runner) -> None:
    prompt = source.prompt(7)
    expected = source.greedy(prompt, 5)
    driver = PlanDriver(runner)
    other = driver.admit(source.prompt(4), 5)
    sequence = driver.admit(prompt, 5, **({ends: ints(9_9, expected[-1])} if ends else {}))
    driver.run()
    assert sequence.output == expected
    assert (sequence.reason, other.reason) == (reason, EndReason.LENGTH)


def test_no_sequence_ends_before_min_total_tokens(source, runner) -> None:
    prompt = source.prompt(7)
    first, *_ = source.greedy(prompt, 1)
    driver = PlanDriver(runner)
    sequence = driver.admit(prompt, 6, eos_token_ids=ints(first), min_total_tokens=len(prompt) + 2)
    plain = driver.admit(prompt, 6, eos_token_ids=ints(first))
    driver.run()
    assert plain.output == [first]
    assert len(sequence.output) > 2
    assert first not in sequence.output[:2]


def test_slots_and_blocks_are_reused(source, make_runner) -> None:
    """Many sequences pass through two slots and a few blocks. A longer one before them leaves nothing behind."""
    runner = make_runner(source.directory, max_num_seqs=2, num_blocks=14)
    driver = PlanDriver(runner)
    for length in (25, 3, 17, 1, 9):
        sequences = [driver.admit(source.prompt(size), 4) for size in (length, 5)]
        driver.run()
        assert [sequence.output for sequence in sequences] == [
            source.greedy(source.prompt(size), 4) for size in (length, 5)
        ]


def test_a_retired_slot_can_be_reused_in_the_same_plan(source, runner) -> None:
    driver = PlanDriver(runner)
    old = driver.admit(source.prompt(12), 30)
    for _ in range(3):
        driver.step()
    driver.retire(old)
    new = driver.admit(source.prompt(5), 6)
    assert new.slot == old.slot
    driver.run()
    assert new.output == source.greedy(source.prompt(5), 6)


def test_preemption_does_not_change_tokens(source, runner) -> None:
    """The sequence is admitted again with its output, in another slot and other blocks. It samples."""
    params = {"temperature": 1.5, "top_p": 0.9, "seed": 77}
    driver = PlanDriver(runner)
    whole = driver.admit(source.prompt(10), 12, **params)
    driver.run()
    driver = PlanDriver(runner)
    driver.admit(source.prompt(3), 40)
    first = driver.admit(source.prompt(10), 12, **params)
    for _ in range(5):
        driver.step()
    driver.retire(first)
    again = driver.admit(first.tokens, 7, max_chunk=4, **params)
    while not again.reason:
        driver.step()
    assert again.tokens == whole.tokens


def test_a_step_without_rows_has_an_empty_result(runner) -> None:
    runner.reset()
    output = runner.execute(StepPlan(1, 1, block_copies=tuples(2, (1, 2))))
    assert output.token_ids.dtype == np.int32
    assert len(output.token_ids) == len(output.end_reasons) == 0


def test_a_chunk_that_does_not_sample_has_no_result(source, runner) -> None:
    driver = PlanDriver(runner)
    driver.admit(source.prompt(9), 2, max_chunk=4)
    assert [len(driver.step().token_ids) for _ in range(4)] == [0, 0, 1, 1]


def test_reset_empties_all_slots(source, runner) -> None:
    for _ in range(2):
        driver = PlanDriver(runner)  # resets
        sequence = driver.admit(source.prompt(5), 3)
        driver.step()
        driver.step()
        assert sequence.output == source.greedy(source.prompt(5), 2)
