"""One step: a plan goes in, sampled tokens come out."""

import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor.plans.limits import Limits
from executor.plans.plan import Fork, Ints, Logprobs, Reports, StepOutput, StepPlan, StepTimings
from executor.sampling.reports import report_candidates, report_prompts, report_tokens, with_overrun
from executor.sampling.sampler import sample
from executor.slots.batch import Batch, build_batch
from executor.slots.slots import Slots


class Model(Protocol):
    """Weights and the KV pool[num_layers, num_blocks, 2, num_kv_heads, block_size, head_dim]."""

    @property
    def pool(self) -> Tensor: ...

    def forward(self, batch: Batch, block_tables: Ints) -> Tensor:
        """Logits[num_samples, vocab_size] of the batch's sample rows, the caller's until the next call.

        Writes the KV of all its tokens. block_tables[max_num_seqs, max_blocks_per_seq]: those of all slots, int32.
        """
        ...

    def copy_blocks(self, copies: Ints) -> None:
        """copies[n, 2]: (source, destination), whole blocks of all layers."""
        ...


class ModelRunner:
    """A model and the slots. One thread at a time."""

    def __init__(self, model: Model, limits: Limits) -> None:
        self.limits = limits
        self.slots = Slots(limits)
        self.model = model

    def reset(self) -> None:
        """A new epoch: all slots are empty. The KV pool keeps what it holds."""
        self.slots.clear()

    @torch.inference_mode()
    def execute(self, plan: StepPlan, computing: Callable[[], None] = lambda: None) -> StepOutput:
        """Runs one step. Raises PlanRejected, and then nothing has changed.

        computing  called when the batch is ready, and the model next
        """
        started_ns = time.monotonic_ns()
        self.slots.apply(plan)
        batch = build_batch(self.slots)
        prepared_ns = time.monotonic_ns()
        computing()
        logits = self._forward(plan, batch)
        forwarded_ns = time.monotonic_ns()
        token_ids, end_reasons, reports = self._sample(plan, logits)
        return StepOutput(
            epoch=plan.epoch,
            step_id=plan.step_id,
            token_ids=token_ids,
            end_reasons=end_reasons,
            timings=StepTimings(
                prepare_ns=prepared_ns - started_ns,
                forward_ns=forwarded_ns - prepared_ns,
                sample_ns=time.monotonic_ns() - forwarded_ns,
            ),
            reports=reports,
        )

    def _forward(self, plan: StepPlan, batch: Batch | None) -> Tensor | None:
        """Copies blocks, then computes the batch: logits[num_samples, vocab_size] of its sample rows."""
        if plan.block_copies.size:
            self.model.copy_blocks(plan.block_copies)
        return None if batch is None else self.model.forward(batch, self.slots.block_tables)

    def _sample(self, plan: StepPlan, logits: Tensor | None) -> tuple[Ints, NDArray[np.uint8], Reports]:
        """Advances, forks, samples and appends. Token ids and end reasons of all slots with a result, and reports."""
        slots = self.slots
        reporting = np.sort(np.concatenate((slots.sampling, slots.overrun, _children(plan.forks))))
        slots.advance()
        slots.fork(plan.forks)

        token_ids = np.zeros(len(reporting), dtype=np.int32)
        end_reasons = np.zeros(len(reporting), dtype=np.uint8)
        is_live = ~slots.counters.has_ended[reporting]
        if logits is None:
            return token_ids, end_reasons, Reports(with_overrun(slots, reporting, is_live, None))
        live = reporting[is_live]
        logprobs: Logprobs | None = None
        if live.size:
            own_logits = _logits_of(live, slots, plan.forks, logits)
            own_ids = sample(own_logits, slots.draw(live))
            logprobs = report_tokens(slots, live, own_logits, own_ids)
            token_ids[is_live], end_reasons[is_live] = own_ids, slots.append(live, own_ids)
        logprobs = with_overrun(slots, reporting, is_live, logprobs)
        return token_ids, end_reasons, Reports(logprobs, *self._report(logits))

    def _report(self, logits: Tensor) -> tuple[Logprobs | None, Logprobs | None]:
        """Of prompts and of beams; nearly always of nobody."""
        slots, num_reaching = self.slots, len(self.slots.reaching)
        if slots.prompt_spans is None and not slots.beams.size:
            return None, None
        beams = torch.from_numpy(np.searchsorted(slots.reaching, slots.beams)).to(logits.device)
        return report_prompts(slots, logits[num_reaching:]), report_candidates(slots, slots.beams, logits[beams])


def _children(forks: tuple[Fork, ...]) -> Ints:
    return np.array([fork.child_slot for fork in forks], dtype=np.int32)


def _logits_of(live: Ints, slots: Slots, forks: tuple[Fork, ...], logits: Tensor) -> Tensor:
    """Rows of logits for each live slot: its own, or its parent's. The first rows are those of the slots that reach."""
    if not forks and not slots.beams.size:
        return logits if slots.prompt_spans is None else logits[: len(live)]
    row_of = {slot: row for row, slot in enumerate(slots.reaching.tolist())}
    row_of |= {fork.child_slot: row_of[fork.parent_slot] for fork in forks if fork.parent_slot in row_of}
    rows = torch.tensor([row_of[slot] for slot in live.tolist()], device=logits.device)
    return logits[rows]
