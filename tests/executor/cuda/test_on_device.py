"""The GPU's runner on a GPU, with real streams and graphs. All tests of this directory run there."""

from __future__ import annotations

from collections import deque

import pytest
import torch

from executor.config import ExecutorConfig
from executor.cuda.accelerator import CudaAccelerator
from executor.cuda.precision import sum_in_float32
from executor.cuda.runner import CudaRunner
from executor.device.device_memory import is_out_of_memory
from executor.loading import load_model
from tests.support.cuda.comparison import assert_same, run_stream
from tests.support.cuda.random_streams import RandomStream
from tests.support.cuda.runner_pair import DEVICE, FinishingRunner, Pair, make_pair, no_progress
from tests.support.executor.plan_driver import generate

pytestmark = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")


@pytest.fixture(params=["llama", "qwen2-window", "qwen3"])
def both(request, checkpoint) -> Pair:
    return make_pair(checkpoint(request.param).directory, DEVICE, max_num_seqs=20, num_blocks=400)


@pytest.mark.parametrize("num_ahead", [1, 2, 5])
def test_random_streams_in_float32_equal_the_reference(both, num_ahead) -> None:
    assert isinstance(both.cuda._accelerator, CudaAccelerator)
    assert both.cuda.graphs.num_missing == 0
    run_stream(both, RandomStream(both.reference.limits, seed=num_ahead), num_ahead, num_steps=200)
    assert not both.pool().isnan().any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_graphs_repeat_the_steps_that_run_without_them(dtype, checkpoint) -> None:
    """Runs a stream before the captures, then the same plans with graphs: the same bits give the same tokens."""
    both = make_pair(
        checkpoint("llama").directory, DEVICE, captures=False, max_num_seqs=20, num_blocks=400, dtype=dtype
    )
    limits, plans, outputs = both.reference.limits, [], []
    stream = RandomStream(limits, seed=9)
    for _ in range(150):
        plans.append(stream.plan())
        outputs.append(both.cuda.execute(plans[-1]).finish())
        stream.learn(outputs[-1])
    both.cuda.reset()
    both.fill_pool(0.0)
    both.cuda.capture_graphs(no_progress)
    launched = deque(both.cuda.execute(plan) for plan in plans)
    for step, expected in zip(launched, outputs, strict=True):
        assert_same(step.finish(), expected)


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


@pytest.mark.parametrize("num_blocks", [200, None])
def test_loading_on_a_gpu_makes_a_runner_with_all_graphs(num_blocks, checkpoint) -> None:
    source = checkpoint("llama")
    settings = {"device": str(DEVICE), "dtype": "float32", "max_num_seqs": 8, "memory_fraction": 0.05}
    shown: list[str] = []
    loaded = load_model(ExecutorConfig(model=str(source.directory), num_blocks=num_blocks, **settings), shown.append)
    assert isinstance(loaded.runner, CudaRunner)
    assert min(loaded.memory_bytes[kind] for kind in ("weights", "step_buffers", "graphs", "activations")) > 0
    assert loaded.graphs == {"captured": 2 * len(loaded.runner.graphs.buckets), "missing": 0}
    assert loaded.idle_work is None
    prompts = [source.prompt(length) for length in (3, 40)]
    assert generate(FinishingRunner(loaded.runner), prompts, 8) == [source.greedy(prompt, 8) for prompt in prompts]


def test_a_capture_without_memory_leaves_the_device_usable(both) -> None:
    """The body of one capture asks for more memory than there is, in its second run; the next captures succeed."""
    accelerator, num_runs = both.cuda._accelerator, []
    memory = accelerator.graph_memory()

    def greedy() -> None:
        num_runs.append(1)
        if len(num_runs) == 2:
            torch.empty(1 << 50, dtype=torch.uint8, device=DEVICE)

    with accelerator.working():
        stream = torch.cuda.current_stream(DEVICE)
        with pytest.raises(RuntimeError) as caught:
            accelerator.capture(greedy, memory)
        assert torch.cuda.current_stream(DEVICE) == stream
    assert is_out_of_memory(caught.value)
    del caught
    accelerator.release()
    both.cuda.capture_graphs(no_progress)
    assert both.cuda.graphs.num_missing == 0
    run_stream(both, RandomStream(both.reference.limits, seed=5), num_ahead=2, num_steps=40)


def test_float32_products_are_rounded_to_float32() -> None:
    """TF32 would have errors of 2**-11 of the sum of magnitudes; float32 has 2**-24 for each of its additions."""
    sum_in_float32()
    generator = torch.Generator().manual_seed(1)
    num_terms = 1024
    left, right = (torch.randn(shape, generator=generator) for shape in ((64, num_terms), (num_terms, 96)))
    product = (left.to(DEVICE) @ right.to(DEVICE)).cpu().double()
    exact, magnitude = left.double() @ right.double(), left.double().abs() @ right.double().abs()
    assert ((product - exact).abs() <= magnitude * 2.0**-18).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 16, 256])
def test_half_precision_products_are_summed_in_float32(dtype, num_rows) -> None:
    """The parts of a split sum cancel: rounded to half precision before they are added, they would leave 2**-9 of them.

    All inputs are exact, and each row's sum is that of its last 64 terms.
    """
    sum_in_float32()
    generator = torch.Generator().manual_seed(2)
    num_terms, num_columns = 8192, 64
    half = torch.randn((num_rows, num_terms // 2), generator=generator).to(dtype)
    left = torch.cat((half, -half, torch.ones(num_rows, 64, dtype=dtype)), dim=1)
    column = torch.randn((num_terms // 2, num_columns), generator=generator).to(dtype)
    right = torch.cat((column, column, torch.full((64, num_columns), 2.0**-6, dtype=dtype)))
    product = (left.to(DEVICE) @ right.to(DEVICE)).cpu().double()
    magnitude = left.double().abs() @ right.double().abs()
    assert ((product - 1.0).abs() <= magnitude * 2.0**-18 + torch.finfo(dtype).eps).all()
