"""The start of a runner on a GPU, with the memory of the device given by the test."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from executor.config import ExecutorConfig
from executor.cuda.accelerator import EagerAccelerator
from executor.cuda.loading import CudaStart
from executor.cuda.rehearsal import rehearse
from executor.device.kv_pool import allocate_pool, fitting_blocks
from executor.errors import OutOfMemory
from executor.plans.limits import PlanLimits
from executor.slots.slots import Slots
from kernels import AttentionShape
from tests.support.cuda.random_streams import RandomStream
from tests.support.cuda.runner_pair import DEVICE, FinishingRunner, Pair
from tests.support.executor.plan_driver import PlanDriver, generate

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="uses a simulated device with little memory")
GIB = 1 << 30
NUM_GRAPHS = 6
"""Two kinds of them for each of the buckets 1, 2 and 3."""


class Memory:
    """24 GiB of which weights and buffers take 17. Graphs take a part for each capture, and steps what they take.

    The numbers of an 8B model: 1.2 GiB for a step of 8,192 tokens, 20 MiB for each of 46 graphs.
    """

    def __init__(self, graph_bytes: int = 20 << 20, step_bytes: int = 1229 << 20, free_bytes: int = 7 * GIB) -> None:
        self.graph_bytes, self.step_bytes, self.free_bytes = graph_bytes, step_bytes, free_bytes
        self.graphs: weakref.WeakSet = weakref.WeakSet()
        self.least = free_bytes

    def settle(self) -> int:
        self.least = self.free_bytes - self.graph_bytes * len(self.graphs)
        return self.least

    def least_free(self) -> int:
        return self.least

    def begin_step(self) -> None:
        left = self.free_bytes - self.graph_bytes * len(self.graphs) - self.step_bytes
        if left < 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.2 GiB")
        self.least = min(self.least, left)


class SmallDevice(EagerAccelerator):
    """A device that takes the memory of `Memory` for each graph and for each step."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def capture(self, body, memory):
        def graph() -> None:
            body()

        self.memory.graphs.add(graph)
        return graph

    def send(self, host: torch.Tensor) -> torch.Tensor:
        self.memory.begin_step()
        return super().send(host)


def start_on(memory: Memory, both: Pair, shown: list[str]) -> CudaStart:
    model = both.cuda._forward.model
    shape = both.cuda._forward.shape
    assert isinstance(shape, AttentionShape)
    limits = both.reference.limits

    def progress_of(phase: str):
        return lambda name, done, total: shown.append(phase)

    return CudaStart(model, shape, limits, progress_of, SmallDevice(memory), memory)


@pytest.fixture
def both(pair) -> Pair:
    """Returns two runners with small limits: the largest steps, which most of these tests run, are fast then."""
    return pair("llama", max_num_seqs=3, max_num_batched_tokens=12)


def test_the_pool_leaves_room_for_graphs_and_the_largest_step(both, checkpoint) -> None:
    shown: list[str] = []
    memory = Memory()
    start = start_on(memory, both, shown)
    assert list(start.memory_bytes) == ["step_buffers"]
    free_bytes = start.free_for_pool()
    assert start.memory_bytes["graphs"] == NUM_GRAPHS * (20 << 20)
    assert start.memory_bytes["activations"] == 1229 << 20
    assert free_bytes == 7 * GIB - (1229 << 20) - NUM_GRAPHS * (20 << 20)
    assert not memory.graphs, "those of the rehearsal are gone"
    config = both.cuda._forward.model.config
    num_blocks = fitting_blocks(
        ExecutorConfig(model="m"), config, torch.float32, torch.device("cuda:0"), free_bytes, start.memory_bytes
    )
    block_bytes = 16 * both.reference.model.pool[:, 0].nbytes // 4
    assert num_blocks == int(free_bytes * 0.9) // block_bytes
    runner = start.make_runner(allocate_pool(config, 100, 4, torch.float32, DEVICE), both.reference.limits)
    assert len(runner.graphs) == len(memory.graphs) == NUM_GRAPHS
    assert Counter(shown) == {"kernels": shown.count("kernels"), "graphs": 2 * NUM_GRAPHS}
    prompts = [checkpoint("llama").prompt(length) for length in (3, 9)]
    assert generate(FinishingRunner(runner), prompts, 4) == generate(both.reference, prompts, 4)


def test_a_device_that_is_too_small_for_a_step_says_what_to_lower(both) -> None:
    start = start_on(Memory(free_bytes=GIB), both, [])
    with pytest.raises(OutOfMemory) as caught:
        start.free_for_pool()
    assert str(caught.value).startswith("a step of 12 tokens and 3 sequences, with 1,073,741,824 bytes free beside")
    assert "lower --max-num-batched-tokens" in str(caught.value)


def test_a_device_without_room_for_two_blocks_names_what_takes_it(both) -> None:
    start = start_on(Memory(free_bytes=(1229 << 20) + NUM_GRAPHS * (20 << 20) + 100), both, [])
    free_bytes = start.free_for_pool()
    assert free_bytes == 100
    config = both.cuda._forward.model.config
    taken = {"weights": 16 * GIB} | start.memory_bytes
    with pytest.raises(OutOfMemory, match=r"weights 17,179,869,184, step buffers .*, graphs 125,829,120, activations"):
        fitting_blocks(ExecutorConfig(model="m"), config, torch.float32, torch.device("cuda:0"), free_bytes, taken)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make while they are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self._watch(tensor.untyped_storage())
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        address, num_bytes = storage.data_ptr(), storage.nbytes()
        if num_bytes and address not in self._known:
            self._known.add(address)
            self.now += num_bytes
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, address, num_bytes)

    def _forget(self, address: int, num_bytes: int) -> None:
        self._known.discard(address)
        self.now -= num_bytes


def limits_of(**values: int) -> PlanLimits:
    defaults = {"vocab_size": 300, "max_model_len": 64, "block_size": 4, "num_blocks": 50, "max_num_seqs": 6}
    return PlanLimits(**{**defaults, "max_num_batched_tokens": 48, **values})


@pytest.mark.parametrize(
    "values",
    [{}, {"max_num_seqs": 1, "max_num_batched_tokens": 1}, {"max_model_len": 3}, {"max_num_batched_tokens": 7}],
)
def test_the_rehearsal_is_as_large_as_the_limits_allow(values) -> None:
    """Checks the plans with a runner that applies them to slots and computes nothing."""
    limits, largest = limits_of(**values), [0, 0]
    slots = Slots(limits)

    def execute(plan):
        slots.apply(plan)
        counts = slots.counters.row_count
        largest[:] = max(largest[0], int(counts.sum())), max(largest[1], int((counts > 0).sum()))
        slots.advance()
        slots.append(slots.sampling, slots.sampling * 0)
        return SimpleNamespace(finish=lambda: None)

    rehearse(SimpleNamespace(limits=limits, reset=slots.clear, execute=execute))
    assert largest[1] == min(limits.max_num_seqs, max(1, limits.max_num_batched_tokens // 2))
    longest = max(1, limits.max_model_len - 2)
    assert largest[0] == min(limits.max_num_batched_tokens, largest[1] * longest)


def test_no_step_takes_more_memory_than_the_rehearsal(both, checkpoint) -> None:
    """Compares with random streams, and with a step that has as many prompt tokens as one may have."""
    peaks = []
    gc.collect()
    for run in (rehearse, _random_steps, _one_long_prompt):
        both.cuda.reset()
        with LiveBytes() as live:
            run(both.cuda)
        peaks.append(live.peak)
    assert peaks[0] >= max(peaks[1:]) > 100_000


def _random_steps(runner) -> None:
    stream = RandomStream(runner.limits, seed=20)
    for _ in range(12):
        stream.learn(runner.execute(stream.plan()).finish())


def _one_long_prompt(runner) -> None:
    driver = PlanDriver(FinishingRunner(runner))
    driver.admit([5] * runner.limits.max_num_batched_tokens, 2, temperature=1.0, repetition_penalty=1.2)
    driver.step()
