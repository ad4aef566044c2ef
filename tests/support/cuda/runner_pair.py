"""Two runners of one checkpoint: the one under test and the reference.

QUIRE_TEST_DEVICE names the GPU of these tests, "cuda:0" by default. With "cuda:1", code that uses the current device in
place of the model's fails.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from executor.config import ExecutorConfig
from executor.cuda.accelerator import accelerator_for
from executor.cuda.buffers import StepBuffers
from executor.cuda.runner import CudaRunner
from executor.loading import load_model
from executor.models.decoder import Decoder
from kernels import AttentionShape
from kernels import triton as home
from tests.support.triton.interpreter import IS_INTERPRETED

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from executor.cuda.accelerator import Accelerator
    from executor.device.runner import ModelRunner
    from executor.plans.plan import StepOutput, StepPlan

DEVICE = torch.device(
    "cpu" if IS_INTERPRETED or not torch.cuda.is_available() else os.environ.get("QUIRE_TEST_DEVICE", "cuda:0")
)


@dataclass(frozen=True, slots=True)
class Pair:
    """The two runners. The null block of the one under test is poisoned, and so are the inputs of its padding rows."""

    reference: ModelRunner
    cuda: CudaRunner

    def fill_pool(self, value: float) -> None:
        """Writes all blocks but the null block. Waits for it: the runner works in another stream of the GPU."""
        self.cuda._pool[:, 1:] = value
        settle()

    def pool(self) -> torch.Tensor:
        """Returns a copy of all blocks but the null block, once all steps have written theirs."""
        settle()
        return self.cuda._pool[:, 1:].clone()


def settle() -> None:
    """Waits until a GPU has done all that was launched, in any stream."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize(DEVICE)


def no_progress(name: str, done: int, total: int) -> None:
    """Shows nothing: see `kernels.Progress`."""


class FinishingRunner:
    """The runner under test, which finishes each step before it returns."""

    def __init__(self, runner: CudaRunner) -> None:
        self.runner = runner
        self.limits = runner.limits

    def reset(self) -> None:
        self.runner.reset()

    def execute(self, plan: StepPlan, computing: Callable[[], None] = lambda: None) -> StepOutput:
        return self.runner.execute(plan, computing).finish()


def make_pair(
    directory: Path,
    device: torch.device,
    accelerator: Accelerator | None = None,
    *,
    captures: bool = DEVICE.type == "cuda",
    **settings: object,
) -> Pair:
    """Makes two runners of a checkpoint. captures: captures all graphs first, which takes long in the interpreter."""
    values = {"block_size": 4, "num_blocks": 100, "max_num_seqs": 6, "max_num_batched_tokens": 48, **settings}
    config = ExecutorConfig(model=str(directory), device=str(device), kernels="reference", **values)
    loaded = load_model(config, lambda line: None)
    reference = loaded.runner
    own, limits = reference.model.decoder.config, reference.limits
    model = Decoder(own, reference.model.decoder.weights, home, limits.max_model_len)
    shape = AttentionShape(model.dtype, own.num_heads, own.num_kv_heads, own.head_dim, limits.block_size)
    buffers = StepBuffers.allocate(model, shape, limits.max_num_seqs, limits.max_model_len, device)
    pool = torch.zeros_like(reference.model.pool)
    pool[:, 0] = float("nan")
    buffers.on_device.block_tables[-1] = 1 << 30
    buffers.on_device.end_kinds[-1] = 1
    settle()
    cuda = CudaRunner(model, shape, buffers, pool, limits, accelerator or accelerator_for(device), loaded.grammars)
    if captures:
        cuda.capture_graphs(no_progress)
    return Pair(reference, cuda)
