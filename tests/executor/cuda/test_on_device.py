"""The GPU's runner on a GPU, with real streams and graphs. All tests of this directory run there."""

from __future__ import annotations

from collections import deque

import pytest
import torch

from executor.config import ExecutorConfig
from executor.cuda.accelerator import CudaAccelerator
from executor.cuda.runner import CudaRunner
from executor.loading import load_model
from tests.support.cuda.comparison import assert_same, run_stream
from tests.support.cuda.random_streams import RandomStream
from tests.support.cuda.runner_pair import FinishingRunner, Pair, make_pair
from tests.support.executor.plan_driver import generate
from tests.support.triton.interpreter import IS_INTERPRETED

pytestmark = pytest.mark.skipif(IS_INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(params=["llama", "qwen2-window", "qwen3"])
def both(request, checkpoint) -> Pair:
    return make_pair(checkpoint(request.param).directory, torch.device("cuda:0"), max_num_seqs=20, num_blocks=400)


@pytest.mark.parametrize("num_ahead", [1, 2, 5])
def test_random_streams_in_float32_equal_the_reference(both, num_ahead) -> None:
    assert isinstance(both.cuda._accelerator, CudaAccelerator)
    run_stream(both, RandomStream(both.reference.limits, seed=num_ahead), num_ahead, num_steps=200)
    assert 2 < len(both.cuda.graphs) <= 2 * len(both.cuda.graphs.buckets)
    assert not both.cuda._pool[:, 1:].isnan().any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_replayed_graphs_repeat_the_captured_run(dtype, checkpoint) -> None:
    """Runs a stream with captures in between, then with replays alone: the same bits give the same tokens."""
    device = torch.device("cuda:0")
    both = make_pair(checkpoint("llama").directory, device, max_num_seqs=20, num_blocks=400, dtype=dtype)
    limits, plans, outputs = both.reference.limits, [], []
    stream = RandomStream(limits, seed=9)
    for _ in range(150):
        plans.append(stream.plan())
        outputs.append(both.cuda.execute(plans[-1]).finish())
        stream.learn(outputs[-1])
    num_graphs = len(both.cuda.graphs)
    both.cuda.reset()
    both.cuda._pool[:, 1:] = 0
    launched = deque(both.cuda.execute(plan) for plan in plans)
    for step, expected in zip(launched, outputs, strict=True):
        assert_same(step.finish(), expected)
    assert len(both.cuda.graphs) == num_graphs


def test_timings_are_measured_on_the_device(both) -> None:
    timings = []
    for runner in (FinishingRunner(both.cuda), FinishingRunner(both.cuda)):
        stream = RandomStream(both.reference.limits, seed=2)
        runner.reset()
        for _ in range(20):
            output = runner.execute(stream.plan())
            stream.learn(output)
            timings.append(output.timings)
    assert sum(one.forward_ns > 0 for one in timings) > 20
    assert all(one.idle_ns >= 0 and one.sample_ns >= 0 and one.prepare_ns > 0 for one in timings)


def test_loading_on_a_gpu_makes_a_cuda_runner(checkpoint) -> None:
    source = checkpoint("llama")
    config = ExecutorConfig(model=str(source.directory), device="cuda", dtype="float32", num_blocks=200, max_num_seqs=8)
    loaded = load_model(config, lambda line: None)
    assert isinstance(loaded.runner, CudaRunner)
    assert loaded.memory_bytes["step_buffers"] > 0
    assert len(loaded.runner.graphs) == 2
    prompts = [source.prompt(length) for length in (3, 40)]
    assert generate(FinishingRunner(loaded.runner), prompts, 8) == [source.greedy(prompt, 8) for prompt in prompts]
    num_left = len(list(loaded.idle_work))
    assert len(loaded.runner.graphs) == 2 * len(loaded.runner.graphs.buckets) >= num_left > 0
    loaded.runner.reset()
    assert generate(FinishingRunner(loaded.runner), prompts, 8) == [source.greedy(prompt, 8) for prompt in prompts]
