"""Makes a runner for a GPU that is ready for its first plan: nothing is compiled, captured or measured while it serves.

    weights │ buffers │ rehearsal with a tiny pool: graphs, largest steps │ pool │ graphs, largest steps │ ready

What the rehearsal takes is what the pool must leave free.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from executor.cuda.accelerator import Accelerator, accelerator_for
from executor.cuda.buffers import StepBuffers
from executor.cuda.rehearsal import NUM_BLOCKS, rehearse
from executor.cuda.runner import CudaRunner
from executor.device.device_memory import CudaMemory, DeviceMemory, fitting
from kernels.triton import warm_up

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from executor.grammars.grammar_cache import Grammars
    from executor.models.decoder import Decoder
    from executor.plans.limits import PlanLimits
    from kernels import AttentionShape, Progress


class CudaStart:
    """Everything of a runner but its pool.

    progress_of: returns the progress of a phase that has this name.
    memory_bytes: what the runner needs besides weights and pool, by kind: "step_buffers", and once it has been measured
    "activations" (at most, during a step) and "graphs".
    """

    def __init__(
        self,
        model: Decoder,
        shape: AttentionShape,
        limits: PlanLimits,
        progress_of: Callable[[str], Progress],
        accelerator: Accelerator | None = None,
        memory: DeviceMemory | None = None,
    ) -> None:
        """Compiles all kernels and allocates the buffers. Raises OutOfMemory. limits: num_blocks does not matter."""
        self._model, self._shape, self._limits = model, shape, limits
        self._progress_of = progress_of
        with fitting(f"buffers of {limits.max_num_seqs} sequences (lower --max-num-seqs or --max-model-len)"):
            self._accelerator = accelerator or accelerator_for(model.device)
            self._memory = memory or CudaMemory(model.device)
            with (
                self._accelerator.working()
            ):  # Triton launches on the current device, which is the first one by default
                warm_up(
                    shape,
                    progress_of("kernels"),
                    hidden_size=model.config.hidden_size,
                    vocab_size=limits.vocab_size,
                    max_num_seqs=limits.max_num_seqs,
                    device=model.device,
                )
            self._buffers = StepBuffers.allocate(model, shape, limits.max_num_seqs, limits.max_model_len, model.device)
        self.memory_bytes = {"step_buffers": self._buffers.num_bytes}

    def free_for_pool(self) -> int:
        """Returns the bytes that are left for a pool beside all that a runner needs. Raises OutOfMemory."""
        free_bytes = self._memory.settle()
        config = self._model.config
        shape = (config.num_layers, NUM_BLOCKS, 2, config.num_kv_heads, self._shape.block_size, config.head_dim)
        with fitting(f"a pool of {NUM_BLOCKS} blocks"):
            pool = torch.zeros(shape, dtype=self._model.dtype, device=self._model.device)
        self.make_runner(pool, replace(self._limits, num_blocks=NUM_BLOCKS))
        gc.collect()  # the runner and its graphs know each other
        return max(0, free_bytes - self.memory_bytes["activations"] - self.memory_bytes["graphs"])

    def make_runner(self, pool: Tensor, limits: PlanLimits, grammars: Grammars | None = None) -> CudaRunner:
        """Returns a runner that has captured its graphs and run the largest steps. Raises OutOfMemory."""
        free_bytes = self._memory.settle()
        text = (
            f"a step of {limits.max_num_batched_tokens:,} tokens and {limits.max_num_seqs} sequences, with"
            f" {free_bytes:,} bytes free beside weights, buffers and {limits.num_blocks} blocks of the KV pool"
            " (lower --max-num-batched-tokens, --max-num-seqs or --num-blocks)"
        )
        with fitting(text):
            runner = CudaRunner(self._model, self._shape, self._buffers, pool, limits, self._accelerator, grammars)
            runner.capture_graphs(self._progress_of("graphs"))
            left_bytes = self._memory.settle()
            # Last, so that torch keeps the memory of these steps at hand: a capture gives back what is only cached.
            rehearse(runner)
        activation_bytes = left_bytes - self._memory.least_free()
        self.memory_bytes |= {"graphs": max(0, free_bytes - left_bytes), "activations": max(0, activation_bytes)}
        return runner
