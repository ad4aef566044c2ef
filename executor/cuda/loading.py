"""Makes a runner for a GPU that is ready for its first plan, so that nothing is compiled while it serves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from executor.cuda.accelerator import accelerator_for
from executor.cuda.runner import CudaRunner
from executor.plans.plan import Admission, SequenceParams, StepPlan
from kernels.triton import warm_up

if TYPE_CHECKING:
    from torch import Tensor

    from executor.cuda.buffers import StepBuffers
    from executor.models.decoder import Decoder
    from executor.plans.limits import PlanLimits
    from kernels import AttentionShape, Progress

# Parameters for one step of each kind: greedy, sampled, and with reports and changed logits.
_REHEARSED: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0},
    {"repetition_penalty": 1.1, "num_logprobs": 2, "num_prompt_logprobs": 2, "num_prompt_tokens": 2},
)


def make_runner(
    model: Decoder, shape: AttentionShape, buffers: StepBuffers, pool: Tensor, limits: PlanLimits, progress: Progress
) -> CudaRunner:
    """Compiles all kernels and runs a few steps, so that libraries prepare now what they prepare on first use."""
    accelerator = accelerator_for(model.device)
    with accelerator.working():  # Triton launches on the current device, which is the first one by default
        warm_up(
            shape,
            progress,
            hidden_size=model.config.hidden_size,
            vocab_size=limits.vocab_size,
            max_num_seqs=limits.max_num_seqs,
            device=model.device,
        )
        runner = CudaRunner(model, shape, buffers, pool, limits, accelerator)
        rehearse(runner)
    return runner


def rehearse(runner: CudaRunner) -> None:
    """Runs a prompt and a decode of each kind, which captures the smallest graphs.

    Leaves nothing behind except in block 1. Does nothing if a sequence of three tokens does not fit.
    """
    limits = runner.limits
    if limits.max_model_len < 4 or limits.block_size < 3 or limits.max_num_batched_tokens < 2:
        return
    for params in _REHEARSED:
        runner.reset()
        admission = Admission(
            slot=0,
            token_ids=np.zeros(2, dtype=np.int32),
            num_computed_tokens=0,
            block_table=np.ones(1, dtype=np.int32),
            params=SequenceParams(max_total_tokens=4, min_total_tokens=3, **params),
        )
        counts = [np.array([[0, count]], dtype=np.int32) for count in (2, 1)]
        runner.execute(StepPlan(0, 1, admissions=(admission,), row_counts=counts[0])).finish()
        runner.execute(StepPlan(0, 2, row_counts=counts[1])).finish()
    runner.reset()
