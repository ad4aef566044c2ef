"""Runs one step at once: a plan goes in, sampled tokens come out."""

import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor.grammars.grammar_cache import Grammars
from executor.models.model import Model
from executor.plans.limits import PlanLimits
from executor.plans.plan import Ints, Logprobs, Publication, Reports, StepOutput, StepPlan, StepTimings
from executor.sampling.finite import FiniteCheck, finite_rows
from executor.sampling.reports import report_candidates, report_prompts, report_tokens, with_overrun
from executor.sampling.sampler import sample
from executor.slots.launch import launch_of
from executor.slots.slots import Slots
from executor.slots.step_inputs import StepInputs, begin_step


class ModelRunner:
    """A model and the slots. One thread at a time may use it."""

    def __init__(self, model: Model, limits: PlanLimits, grammars: Grammars | None = None) -> None:
        self.limits = limits
        self.slots = Slots(limits, grammars)
        self.model = model
        self._finite = FiniteCheck()

    def reset(self, digest_scheme: str = "", *, is_trusted: bool = True) -> Publication:
        """Empties all slots for a new epoch, and returns the blocks that are retained for it, see `Slots.clear`.

        The KV pool keeps its contents.
        """
        return self.slots.clear(digest_scheme, is_trusted=is_trusted)

    @torch.inference_mode()
    def execute(self, plan: StepPlan, computing: Callable[[], None] = lambda: None) -> StepOutput:
        """Runs one step. Raises PlanRejected, in which case nothing has changed.

        computing  called when the step is prepared, right before the model runs
        """
        started_ns = time.monotonic_ns()
        self.slots.apply(plan)
        step = begin_step(self.slots, plan.forks)
        launch = launch_of(step, self.slots)
        prepared_ns = time.monotonic_ns()
        computing()
        self.slots.begin_masks()  # now, because the model computes without the interpreter
        if plan.block_copies.size:
            self.model.copy_blocks(plan.block_copies)
        logits = self.model.forward(launch) if step.num_rows else None
        forwarded_ns = time.monotonic_ns()
        token_ids, end_reasons, reports = self._sample(step, logits)
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

    def _sample(self, step: StepInputs, logits: Tensor | None) -> tuple[Ints, NDArray[np.uint8], Reports]:
        """Samples and appends. Returns the token ids and end reasons of step.reporting, and the reports.

        Raises ModelBroken for too many rows that are not finite.
        """
        token_ids, end_reasons = np.zeros(len(step.reporting), np.int32), np.zeros(len(step.reporting), np.uint8)
        is_live = np.zeros(len(step.reporting), dtype=np.bool_)
        logprobs: Logprobs | None = None
        failed = np.zeros(len(step.sampling), dtype=np.bool_)
        if logits is not None and step.sampling.size:
            places = np.searchsorted(step.reporting, step.sampling)
            own_logits = _sampled_logits(step, logits)
            failed = ~finite_rows(own_logits)
            if failed.any():  # the kernels that sample and rank expect numbers
                own_logits = own_logits.clone()
                own_logits[torch.from_numpy(failed).to(logits.device)] = 0
            own_ids = sample(own_logits, self.slots.draw(step.sampling))
            logprobs = report_tokens(self.slots, step.sampling, own_logits, own_ids)
            token_ids[places], end_reasons[places] = own_ids, self.slots.append(step.sampling, own_ids, failed)
            is_live[places] = True
        logprobs = with_overrun(self.slots, step.reporting, is_live, logprobs)
        reports = Reports(logprobs, *self._report(step, logits))
        self._finite.count(step, failed, reports)
        return token_ids, end_reasons, reports

    def _report(self, step: StepInputs, logits: Tensor | None) -> tuple[Logprobs | None, Logprobs | None]:
        """Returns the reports on prompts and on beams. Hardly any step has either."""
        if logits is None or (self.slots.prompt_spans is None and not step.beams.size):
            return None, None
        beams = logits[step.num_sampled_logits : step.first_prompt_logit]
        prompts = report_prompts(self.slots, logits[step.first_prompt_logit :])
        return prompts, report_candidates(self.slots, step.beams, beams)


def _sampled_logits(step: StepInputs, logits: Tensor) -> Tensor:
    """Returns logits[len(step.sampling), vocab_size]: a copy if slots were forked, else a view."""
    if not step.has_forks:
        return logits[: step.num_sampled_logits]
    return logits[torch.from_numpy(step.sampled_logits).to(logits.device)]
