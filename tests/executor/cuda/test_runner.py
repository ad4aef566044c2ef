"""The GPU's runner returns the same results as the reference for the same plans."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from executor.cuda.graphs import bucket_sizes
from executor.cuda.rehearsal import rehearse
from executor.errors import PlanRejected
from executor.plans.plan import EndReason, StepPlan
from kernels.triton import StateField
from tests.support.cuda.comparison import ALL_KINDS, TopTwo, _counts, _first_plan, assert_same, run_stream
from tests.support.cuda.random_streams import RandomStream
from tests.support.cuda.runner_pair import DEVICE, FinishingRunner
from tests.support.executor.plan_driver import PlanDriver, generate, ints, tuples

SEEN = Counter()


@pytest.mark.parametrize(
    ("name", "num_ahead", "seed"), [("llama-biases", 1, 48), ("llama", 2, 20), ("qwen2-window", 2, 49)]
)
def test_random_streams_equal_the_reference(name, num_ahead, seed, pair) -> None:
    both = pair(name)
    stream = RandomStream(both.reference.limits, seed)
    run_stream(both, stream, num_ahead)
    written = both.reference.model.pool[:, 1:]
    torch.testing.assert_close(both.pool(), written, rtol=1e-3, atol=1e-4)
    assert (written != 0).any()
    SEEN.update(stream.seen)


def test_the_random_streams_cover_every_event() -> None:
    if not SEEN:
        pytest.skip("runs after test_random_streams_equal_the_reference")
    for kind in ALL_KINDS:
        assert SEEN[kind] >= 2, (kind, SEEN)


@pytest.mark.parametrize("name", ["qwen3", "llama-biases", "mistral-window"])
def test_families_equal_the_reference(name, pair, checkpoint) -> None:
    both, source = pair(name), checkpoint(name)
    prompts = [source.prompt(length) for length in (1, 6, 17)]
    assert generate(FinishingRunner(both.cuda), prompts, 5, max_chunk=7) == generate(
        both.reference, prompts, 5, max_chunk=7
    )


@pytest.mark.skipif(DEVICE.type == "cuda", reason="half precision on a GPU rounds otherwise")
def test_float16_writes_the_same_kv(pair, checkpoint) -> None:
    """Tokens may differ when logits nearly tie, but the KV of the prompt may not."""
    both, source = pair("llama", dtype="float16"), checkpoint("llama")
    pools = []
    for runner in (FinishingRunner(both.cuda), both.reference):
        driver = PlanDriver(runner)
        sequence = driver.admit(source.prompt(9), 3)
        driver.step()
        driver.step()
        pools.append(list(sequence.block_table))
    blocks = pools[0][:2]
    assert pools[0] == pools[1]
    torch.testing.assert_close(both.cuda._pool[:, blocks], both.reference.model.pool[:, blocks], rtol=0.02, atol=0.02)


def test_every_bucket_runs_full_and_padded(pair, checkpoint) -> None:
    """Grows from one row to all slots, so that each bucket runs full and padded. Padding has no effect."""
    both, source = pair("llama-biases"), checkpoint("llama-biases")
    outputs = []
    for runner in (FinishingRunner(both.cuda), both.reference):
        driver = PlanDriver(runner)
        sequences = []
        for index in range(runner.limits.max_num_seqs):
            sequences.append(driver.admit(source.prompt(3, seed=index), 14))
            driver.step()
            driver.step()
        driver.run()
        outputs.append([sequence.output for sequence in sequences])
    assert outputs[0] == outputs[1]
    assert len(both.cuda.graphs.buckets) == len(bucket_sizes(6)) == 4
    assert not both.pool().isnan().any()


def test_graphs_are_captured_between_steps_without_effect(pair, checkpoint) -> None:
    """Captures all graphs in the middle of a generation, largest first, and checks that its rows do not change."""
    both, prompt, names = pair("llama"), checkpoint("llama").prompt(5), []
    outputs = []
    for runner in (FinishingRunner(both.cuda), both.reference):
        driver = PlanDriver(runner)
        sequences = [driver.admit(prompt, 7, min_total_tokens=8) for _ in range(2)]
        for _ in range(3):
            driver.step()
        if runner is not both.reference:
            both.cuda.capture_graphs(lambda name, done, total: names.append((name, done, total)))
        driver.run()
        outputs.append([sequence.output for sequence in sequences])
    assert outputs[0] == outputs[1]
    assert len(both.cuda.graphs) == 2 * len(both.cuda.graphs.buckets) == 8
    assert both.cuda.graphs.num_missing == 0
    assert names[0] == ("6 sequences, forward", 0, 8)
    assert names[-1] == ("1 sequences, greedy", 7, 8)


def test_the_rehearsal_changes_no_state(pair, checkpoint) -> None:
    # Its steps are as large as the limits allow, so small limits make it fast in the interpreter.
    both, source = pair("llama", max_num_seqs=3, max_num_batched_tokens=12), checkpoint("llama")
    rehearse(both.cuda)
    prompts = [source.prompt(length) for length in (5, 2)]
    assert generate(FinishingRunner(both.cuda), prompts, 4) == generate(both.reference, prompts, 4)
    assert not both.pool().isnan().any()


def first_token(both, prompt: list[int]) -> int:
    return generate(both.reference, [prompt], 1)[0][0]


def test_an_ended_slot_writes_to_the_null_block_before_the_host_knows(pair, checkpoint) -> None:
    both, prompt = pair("llama"), checkpoint("llama").prompt(5)
    eos = ints(first_token(both, prompt))
    driver = PlanDriver(FinishingRunner(both.cuda))
    driver.admit(prompt, 9, eos_token_ids=eos)
    plan = _first_plan(driver)
    both.fill_pool(7.0)
    first = both.cuda.execute(plan)
    pool = both.pool()
    seconds = [both.cuda.execute(StepPlan(1, step_id, row_counts=_counts(step_id))) for step_id in (2, 3)]
    assert first.finish().end_reasons.tolist() == [EndReason.EOS]
    for second in seconds:
        output = second.finish()
        assert (output.token_ids.tolist(), output.end_reasons.tolist()) == ([0], [0])
    assert torch.equal(both.pool(), pool)
    state = both.cuda._buffers.on_device.states[0]
    assert (state[StateField.NUM_TOKENS], state[StateField.LAST_TOKEN]) == (6, eos[0])


def test_a_plan_that_looks_wrong_is_checked_again_with_all_results(pair, checkpoint) -> None:
    """The sequence has ended, but its result has not been taken: its short table is accepted."""
    both, prompt = pair("llama"), checkpoint("llama").prompt(5)
    eos = ints(first_token(both, prompt))
    driver = PlanDriver(FinishingRunner(both.cuda))
    driver.admit(prompt, 20, eos_token_ids=eos)
    both.cuda.execute(_first_plan(driver))
    for step_id in range(2, 8):
        both.cuda.execute(StepPlan(1, step_id, row_counts=_counts(step_id)))
    assert np.flatnonzero(both.cuda.slots.counters.has_ended).tolist() == [0]
    driver = PlanDriver(FinishingRunner(both.cuda), epoch=2)
    driver.admit(prompt, 20)
    both.cuda.execute(_first_plan(driver))
    for step_id in (2, 3, 4):
        both.cuda.execute(StepPlan(2, step_id, row_counts=_counts(step_id)))
    with pytest.raises(PlanRejected, match="too short"):
        both.cuda.execute(StepPlan(2, 5))


def test_a_result_does_not_end_the_next_sequence_of_the_slot(pair, checkpoint) -> None:
    both, source = pair("llama"), checkpoint("llama")
    prompt, other = source.prompt(5), source.prompt(6)
    driver = PlanDriver(FinishingRunner(both.cuda))
    driver.admit(prompt, 9, eos_token_ids=ints(first_token(both, prompt)))
    late = both.cuda.execute(_first_plan(driver))
    driver = PlanDriver(_KeepingRunner(both.cuda), epoch=1)
    sequence = driver.admit(other, 4)
    plan = _first_plan(driver)
    second = both.cuda.execute(replace(plan, step_id=2, retired_slots=ints(0)))
    assert late.finish().end_reasons.tolist() == [EndReason.EOS]
    tokens = [*second.finish().token_ids.tolist()]
    for step_id in (3, 4, 5):
        updates = tuples(3, (0, 2, 3)) if step_id == 5 else tuples(3)
        plan = StepPlan(1, step_id, row_counts=_counts(step_id - 1), table_updates=updates)
        tokens += both.cuda.execute(plan).finish().token_ids.tolist()
    assert [tokens] == generate(both.reference, [other], 4)
    assert sequence.slot == 0


def test_a_rejected_plan_changes_nothing(pair, checkpoint) -> None:
    both, prompt = pair("llama"), checkpoint("llama").prompt(5)
    driver = PlanDriver(FinishingRunner(both.cuda))
    sequence = driver.admit(prompt, 4)
    driver.step()
    states = both.cuda._buffers.on_device.states.clone()
    with pytest.raises(PlanRejected):
        both.cuda.execute(StepPlan(1, 2, retired_slots=ints(0, 5)))
    assert torch.equal(both.cuda._buffers.on_device.states, states)
    driver.run()
    assert [sequence.output] == generate(both.reference, [prompt], 4)


def test_a_difference_from_the_reference_shows_the_gap_of_its_logits(pair, checkpoint, capsys) -> None:
    both, prompt = pair("llama"), checkpoint("llama").prompt(5)
    top_two = TopTwo(both.reference)
    driver = PlanDriver(both.reference)
    driver.admit(prompt, 4)
    expected = driver.step()
    top_two.remove()
    token_id = int(expected.token_ids[0])
    other = replace(expected, token_ids=expected.token_ids + 1)
    with pytest.raises(AssertionError):
        assert_same(other, expected, top_two.describe())
    shown = capsys.readouterr().out
    assert (
        f"token {token_id + 1} in place of {token_id}; in the reference, slot 0's most likely are [{token_id}," in shown
    )
    assert float(re.search(r"with a gap of (\S+) below", shown)[1]) > 0


class _KeepingRunner(FinishingRunner):
    """A runner that keeps its slots when a new driver begins."""

    def reset(self) -> None:
        return
