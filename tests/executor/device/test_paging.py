"""What slots and blocks are for: sharing, forking, copying, overrunning, and being used again."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from executor.plans.plan import EndReason, Fork, StepPlan
from tests.support.executor.conductor import Conductor, LogitsRecorder, ints, tuples


@pytest.fixture
def source(checkpoint):
    return checkpoint("llama")


@pytest.fixture(params=["reference", "auto"])
def runner(request, source, make_runner):
    return make_runner(source.directory, kernels=request.param)


def test_a_cached_prefix_is_not_computed_again(source, runner) -> None:
    prompt = source.prompt(21)
    conductor = Conductor(runner)
    first = conductor.admit(prompt, 6)
    conductor.step()
    second = conductor.admit(prompt[:18] + source.prompt(3, seed=1), 6, prefix=first.block_table[:4])
    before = runner.model.pool[:, first.block_table[:4]].clone()
    conductor.run()
    assert first.output == source.greedy(prompt, 6)
    assert second.output == source.greedy(second.tokens[:21], 6)
    assert torch.equal(runner.model.pool[:, first.block_table[:4]], before)


def test_a_cached_prefix_is_really_read(source, runner) -> None:
    """Were the prefix computed again, its blocks' content would not matter."""
    prompt = source.prompt(9)
    conductor = Conductor(runner)
    first = conductor.admit(prompt, 1)
    conductor.step()
    runner.model.pool[:, first.block_table[0]] = 3.0
    second = conductor.admit(prompt, 4, prefix=first.block_table[:2])
    conductor.retire(first, keep_blocks=True)
    conductor.run()
    assert second.output != source.greedy(prompt, 4)


def test_greedy_children_repeat_their_parent(source, runner) -> None:
    """Fork, then copy-on-write: the parent keeps the partly filled block, each child gets a copy."""
    prompt = source.prompt(10)
    conductor = Conductor(runner)
    parent = conductor.admit(prompt, 9)
    slots = conductor.free_slots[2:4]
    conductor.step(forks=tuple(Fork(parent.slot, slot, seed=slot) for slot in slots))
    children = conductor.seats[1:]
    copies = []
    for child in children:
        copies.append((child.block_table[-1], conductor.free_blocks.pop(0)))
        child.block_table[-1] = copies[-1][1]
    updates = [(child.slot, 2, child.block_table[-1]) for child in children]
    conductor.step(copies=tuple(copies), more=StepPlan(0, 0, table_updates=tuples(3, *updates)))
    assert not torch.equal(runner.model.pool[:, copies[0][0]], torch.zeros_like(runner.model.pool[:, copies[0][0]]))
    conductor.run()
    assert [seat.output for seat in (parent, *children)] == [source.greedy(prompt, 9)] * 3


def test_what_becomes_of_a_copied_block_is_nothing_to_its_copy(source, runner) -> None:
    """Copy-on-write is a copy: once it is made, the source may hold anything."""
    prompt = source.prompt(10)
    conductor = Conductor(runner)
    parent = conductor.admit(prompt, 9)
    slot = conductor.free_slots[2]
    conductor.step(forks=(Fork(parent.slot, slot, seed=0),))
    child = conductor.seats[1]
    shared, own = child.block_table[-1], conductor.free_blocks.pop(0)
    child.block_table[-1] = own
    update = StepPlan(0, 0, table_updates=tuples(3, (child.slot, 2, own)))
    conductor.step(copies=((shared, own),), more=update)
    conductor.retire(parent, keep_blocks=True)
    runner.model.pool[:, shared] = float("nan")
    conductor.run()
    assert child.output == source.greedy(prompt, 9)


def test_children_sample_with_their_own_seed(source, runner) -> None:
    """A fork gives the tokens that a sequence of its own would have had, with that seed."""
    prompt = source.prompt(8)
    outputs = []
    for seed in range(4):
        conductor = Conductor(runner)
        seat = conductor.admit(prompt, 1, temperature=3.0, seed=seed)
        conductor.run()
        outputs.append(seat.output)
    conductor = Conductor(runner)
    parent = conductor.admit(prompt, 1, temperature=3.0, seed=0)
    conductor.step(forks=tuple(Fork(parent.slot, seed, seed=seed) for seed in (3, 1, 2)))
    by_slot = sorted(conductor.seats, key=lambda seat: seat.slot)
    assert [seat.output for seat in by_slot] == outputs
    assert len({tuple(output) for output in outputs}) > 2


def test_an_ended_slot_is_overrun_until_it_is_retired(source, runner) -> None:
    prompt, other = source.prompt(6), source.prompt(11)
    expected = source.greedy(prompt, 6)
    conductor = Conductor(runner)
    ending = conductor.admit(prompt, 20, eos_token_ids=ints(expected[3]))
    going = conductor.admit(other, 12)
    while not ending.reason:
        conductor.step()
    assert ending.output[-1] == expected[3]
    assert ending.reason is EndReason.EOS
    recorder = LogitsRecorder(runner)
    pool = runner.model.pool[:, ending.block_table].clone()
    counters = runner.slots.counters.copy()
    for _ in range(2):
        output = conductor.step()
        assert output.token_ids[0] == 0
        assert output.end_reasons.tolist() == [0, 0]
    assert torch.equal(runner.model.pool[:, ending.block_table[: pool.shape[1]]], pool)
    for name in ("num_tokens", "num_computed_tokens", "has_ended"):
        assert getattr(runner.slots.counters, name)[ending.slot] == getattr(counters, name)[ending.slot]
    assert len(recorder.last) == 1, "nothing is computed for the ended one"
    conductor.retire(ending)
    conductor.run()
    assert going.output == source.greedy(other, 12)


def test_a_fork_of_an_overrun_slot_is_overrun(source, runner) -> None:
    prompt = source.prompt(5)
    conductor = Conductor(runner)
    conductor.admit(prompt, 20, eos_token_ids=ints(source.greedy(prompt, 1)[0]))
    conductor.step()
    output = conductor.step(forks=(Fork(0, 3, seed=1),))
    assert output.token_ids.tolist() == [0, 0]
    assert np.flatnonzero(runner.slots.counters.has_ended).tolist() == [0, 3]


@pytest.mark.parametrize(
    ("ends", "reason"),
    [("eos_token_ids", EndReason.EOS), ("stop_token_ids", EndReason.STOP), (None, EndReason.LENGTH)],
)
def test_end_reasons(ends, reason, source, runner) -> None:
    prompt = source.prompt(7)
    expected = source.greedy(prompt, 5)
    conductor = Conductor(runner)
    other = conductor.admit(source.prompt(4), 5)
    seat = conductor.admit(prompt, 5, **({ends: ints(9_9, expected[-1])} if ends else {}))
    conductor.run()
    assert seat.output == expected
    assert (seat.reason, other.reason) == (reason, EndReason.LENGTH)


def test_no_end_before_the_least_number_of_tokens(source, runner) -> None:
    prompt = source.prompt(7)
    first, *_ = source.greedy(prompt, 1)
    conductor = Conductor(runner)
    seat = conductor.admit(prompt, 6, eos_token_ids=ints(first), min_total_tokens=len(prompt) + 2)
    plain = conductor.admit(prompt, 6, eos_token_ids=ints(first))
    conductor.run()
    assert plain.output == [first]
    assert len(seat.output) > 2
    assert first not in seat.output[:2]


def test_slots_and_blocks_are_used_again(source, make_runner) -> None:
    """Many sequences pass through two slots and a handful of blocks; a longer one before leaves nothing behind."""
    runner = make_runner(source.directory, max_num_seqs=2, num_blocks=14)
    conductor = Conductor(runner)
    for length in (25, 3, 17, 1, 9):
        seats = [conductor.admit(source.prompt(size), 4) for size in (length, 5)]
        conductor.run()
        assert [seat.output for seat in seats] == [source.greedy(source.prompt(size), 4) for size in (length, 5)]


def test_a_retired_slot_can_be_taken_in_the_same_plan(source, runner) -> None:
    conductor = Conductor(runner)
    old = conductor.admit(source.prompt(12), 30)
    for _ in range(3):
        conductor.step()
    conductor.retire(old)
    new = conductor.admit(source.prompt(5), 6)
    assert new.slot == old.slot
    conductor.run()
    assert new.output == source.greedy(source.prompt(5), 6)


def test_preemption_by_recompute_changes_nothing(source, runner) -> None:
    """The sequence comes back with what it generated, in another slot and other blocks; sampled, not greedy."""
    params = {"temperature": 1.5, "top_p": 0.9, "seed": 77}
    conductor = Conductor(runner)
    whole = conductor.admit(source.prompt(10), 12, **params)
    conductor.run()
    conductor = Conductor(runner)
    conductor.admit(source.prompt(3), 40)
    first = conductor.admit(source.prompt(10), 12, **params)
    for _ in range(5):
        conductor.step()
    conductor.retire(first)
    again = conductor.admit(first.tokens, 7, max_chunk=4, **params)
    while not again.reason:
        conductor.step()
    assert again.tokens == whole.tokens


def test_a_step_without_rows(runner) -> None:
    runner.reset()
    output = runner.execute(StepPlan(1, 1, block_copies=tuples(2, (1, 2))))
    assert output.token_ids.dtype == np.int32
    assert len(output.token_ids) == len(output.end_reasons) == 0


def test_a_chunk_that_does_not_sample_has_no_result(source, runner) -> None:
    conductor = Conductor(runner)
    conductor.admit(source.prompt(9), 2, max_chunk=4)
    assert [len(conductor.step().token_ids) for _ in range(4)] == [0, 0, 1, 1]


def test_reset_empties_all_slots(source, runner) -> None:
    for _ in range(2):
        conductor = Conductor(runner)  # resets
        seat = conductor.admit(source.prompt(5), 3)
        conductor.step()
        conductor.step()
        assert seat.output == source.greedy(source.prompt(5), 2)
