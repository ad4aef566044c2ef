"""A model that is divided among ranks generates the tokens of the whole model, for each family and any batching."""

from __future__ import annotations

import pytest
import torch

from executor.models.communicator import add_in_order
from executor.plans.plan import Fork, StepPlan
from tests.support.executor.checkpoints import FAMILIES, make_checkpoint
from tests.support.executor.plan_driver import LogitsRecorder, PlanDriver, generate, tuples
from tests.support.executor.virtual_ranks import virtual_runner

LENGTHS = (1, 2, 5, 16, 17, 31, 40, 3)


_QUICK = {"llama", "llama-biases", "llama-tied", "qwen3"}
_CASES = [
    pytest.param(name, size, marks=[] if size == 2 or name in _QUICK else pytest.mark.exhaustive)
    for name in FAMILIES
    for size in (2, 4)
]


@pytest.mark.parametrize(("name", "size"), _CASES)
def test_tokens_of_a_divided_model_equal_transformers(name, size, checkpoint) -> None:
    source = checkpoint(name)
    prompts = [source.prompt(length) for length in LENGTHS]
    expected = [source.greedy(prompt, 8) for prompt in prompts]
    assert generate(virtual_runner(source.directory, size), prompts, 8, max_chunk=7) == expected


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", ["llama", "llama-biases", "qwen3"])
def test_fast_kernels_divide_a_model_as_the_reference_does(name, size, checkpoint) -> None:
    """Three ranks share four heads unevenly; biases that follow a sum must be added once."""
    source = checkpoint(name)
    prompts = [source.prompt(length) for length in LENGTHS]
    runner = virtual_runner(source.directory, size, kernels="auto", block_size=16)
    assert generate(runner, prompts, 8, max_chunk=19) == [source.greedy(prompt, 8) for prompt in prompts]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_logits_of_a_divided_model_are_close_to_float32(dtype, checkpoint) -> None:
    source = checkpoint("llama")
    prompt = source.prompt(30)
    runner = virtual_runner(source.directory, 4, dtype=dtype, kernels="auto", block_size=16)
    recorder = LogitsRecorder(runner)
    driver = PlanDriver(runner)
    driver.admit(prompt, 1)
    driver.step()
    expected = source.logits(prompt)[-1]
    distance = (recorder.last[0].float() - expected).norm() / expected.norm()
    assert distance < (0.05 if dtype == "bfloat16" else 0.01)


def test_weights_in_several_files_are_divided_like_one_file(tmp_path) -> None:
    source = make_checkpoint("qwen2", tmp_path, max_shard_size="100KB")
    prompt = source.prompt(9)
    assert generate(virtual_runner(tmp_path, 2), [prompt], 8) == [source.greedy(prompt, 8)]


@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_copies_and_forks_reach_every_rank(kernels, checkpoint) -> None:
    """A child continues from blocks that were copied on each rank: from stale ones it would go another way."""
    source = checkpoint("llama")
    prompt = source.prompt(11)
    driver = PlanDriver(virtual_runner(source.directory, 2, kernels=kernels))
    parent = driver.admit(prompt, 12)
    driver.step(forks=(Fork(parent.slot, 1, 5),))
    child = driver.sequences[1]
    last = len(parent.block_table) - 1
    copied = driver.free_blocks.pop(0)
    child.block_table[last] = copied
    more = StepPlan(1, driver.step_id + 1, table_updates=tuples(3, (child.slot, last, copied)))
    driver.step(copies=((parent.block_table[last], copied),), more=more)
    driver.run()
    assert parent.output == child.output == source.greedy(prompt, 12)


def test_partial_sums_are_added_in_the_order_of_the_ranks() -> None:
    """The sum of these numbers depends on the order, and rounding each partial sum to 16 bits would lose the last."""
    parts = [torch.tensor([[1e8, 1.0]]), torch.tensor([[-1e8, 2.0]]), torch.tensor([[1.0, 4.0]])]
    out = torch.empty(1, 2)
    add_in_order(parts, out)
    assert out.tolist() == [[1.0, 7.0]]
    assert parts[0].tolist() == [[1e8, 1.0]], "the parts must stay as they are"
    half = [torch.tensor([[256.0]], dtype=torch.bfloat16)] + 2 * [torch.tensor([[1.0]], dtype=torch.bfloat16)]
    rounded = torch.empty(1, 1, dtype=torch.bfloat16)
    add_in_order(half, rounded)
    assert rounded.item() == 258.0
