"""One step on a GPU: launched here, and finished when its result has arrived.

    host     │ prepare n │ launch n │ prepare n + 1 │ launch n + 1 │ …
    device               │ slots, rows, model, sampler, ends: n    │ n + 1 │ …
    results                                                  n copied out │ finish n

The host never waits for a result in order to launch. The last tokens, and which sequences have ended, are on the
device. Steps that change logits or report more than tokens wait for all steps before them and for their own result.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from executor.cuda.accelerator import Accelerator, Body, Mark
from executor.cuda.buffers import StepBuffers
from executor.cuda.device_slots import slot_changes
from executor.cuda.forward import Forward
from executor.cuda.graphs import Graphs, StepKind
from executor.cuda.launched import CudaLaunchedStep, Marks, PreparedStep
from executor.cuda.retry import with_room
from executor.cuda.sampler import sample, sample_changed, sampling_arrays
from executor.cuda.step_arrays import MixedRows, StepArrays, send
from executor.cuda.upload import Upload
from executor.errors import PlanRejected
from executor.grammars.grammar_cache import Grammars
from executor.models.decoder import Decoder
from executor.plans.limits import PlanLimits
from executor.plans.plan import Ints, Logprobs, Publication, Reports, StepPlan
from executor.sampling.finite import FiniteCheck
from executor.sampling.logprobs import join, row_pieces
from executor.sampling.reports import report_candidates, report_prompts, report_tokens, with_overrun
from executor.slots.slots import Slots
from executor.slots.step_inputs import StepInputs, begin_step
from kernels import AttentionShape, Progress
from kernels.triton import choose_greedily, copy_blocks

# Placeholder on the host for a token that only the device knows. It is negative, as `open_rows` requires, and never an
# end id. So until a result arrives, the host assumes that a sequence ends only when it reaches its maximum length.
_UNKNOWN_TOKEN = -2


class CudaRunner:
    """The model, its KV pool and the slots, on the host and on the device. One thread launches at a time."""

    def __init__(
        self,
        model: Decoder,
        shape: AttentionShape,
        buffers: StepBuffers,
        pool: Tensor,
        limits: PlanLimits,
        accelerator: Accelerator,
        grammars: Grammars | None = None,
    ) -> None:
        self.limits = limits
        self.slots = Slots(limits, grammars)
        self._pool = pool
        self._buffers = buffers
        self._forward = Forward(model, pool, shape, buffers.planner, buffers.on_device, buffers.rows)
        self._accelerator = accelerator
        self._upload = Upload(accelerator)
        self.graphs = Graphs(accelerator, limits.max_num_seqs, self._graph_body)
        # The rows that the device has in buffers.rows.slots; None if that is not known.
        self._device_rows: Ints | None = None
        self._generations = np.zeros(limits.max_num_seqs, dtype=np.int64)
        self._launched: deque[CudaLaunchedStep] = deque()
        self._finite = FiniteCheck()
        self._previous_end: Mark | None = None

    def reset(self, digest_scheme: str = "", *, is_trusted: bool = True) -> Publication:
        """Empties all slots for a new epoch, and returns the blocks that are retained for it, see `Slots.clear`.

        The KV pool keeps its contents. Without a digest scheme, steps under way can finish later.
        """
        if digest_scheme:
            is_trusted = self._all_succeed() and is_trusted
        retained = self.slots.clear(digest_scheme, is_trusted=is_trusted)
        self._launched.clear()
        self._device_rows = None  # a failed step may have recorded rows that were never sent
        self._generations += 1
        return retained

    @torch.inference_mode()
    def capture_graphs(self, progress: Progress) -> None:
        """Captures all graphs, on rows of padding, so that the run before a capture changes nothing."""
        with self._accelerator.working():
            self._buffers.rows.slots.fill_(self._buffers.on_device.padding_slot)
            self._device_rows = None
            self.graphs.capture(progress)

    @torch.inference_mode()
    def execute(self, plan: StepPlan, computing: Callable[[], None] = lambda: None) -> CudaLaunchedStep:
        """Launches one step. Raises PlanRejected, in which case nothing has changed.

        computing  called when the step is prepared, right before it is launched
        """
        with self._accelerator.working():
            prepared = self._prepare(plan)
            computing()
            launched = self._launch(prepared)
            if prepared.step.is_synchronous:
                launched.end(self.slots.append(prepared.step.sampling, launched.sampled()))
                self.slots.begin_masks()
        self._launched.append(launched)
        return launched

    def _prepare(self, plan: StepPlan) -> PreparedStep:
        """Applies the plan and collects what its step needs. Raises PlanRejected, in which case nothing has changed."""
        started_ns = time.monotonic_ns()
        self._apply(plan)
        step = begin_step(self.slots, plan.forks)
        draw = self.slots.draw(step.sampling)
        arrays = replace(
            slot_changes(plan, self.limits),
            copied_blocks=np.ascontiguousarray(plan.block_copies.T, dtype=np.int64) if plan.block_copies.size else None,
            sampling=sampling_arrays(draw),
        )
        kind = StepKind.GREEDY if draw.is_plain_greedy and not step.is_synchronous else StepKind.FORWARD
        bucket = 0
        if step.is_decode_only:
            bucket = self.graphs.bucket(len(step.slots))
            arrays = replace(arrays, decode_slots=self._changed_rows(step, bucket))
        elif step.num_rows:
            arrays = replace(arrays, mixed=self._forward.mixed_rows(step, self.slots))
        if not step.is_synchronous:
            self.slots.append(step.sampling, np.full(len(step.sampling), _UNKNOWN_TOKEN, dtype=np.int32))
        num_computed = self.slots.counters.num_computed_tokens[step.sampling]
        return PreparedStep(plan, step, num_computed, draw, arrays, kind, bucket, started_ns)

    def _apply(self, plan: StepPlan) -> None:
        """Checks the plan and applies it to the slots. Raises PlanRejected.

        The host may not know yet that a sequence has ended, and may reject a plan that is right for an ended one. So a
        plan is rejected only when it still looks wrong with all results in.

        What sequences have computed counts as written when the plan changes tables. With one result missing that is
        right: a sequence that has not ended before this step writes all its rows. Two plans in flight never wait here.
        """
        self._learn_ends(most_unknown=1 if plan.changes_tables else len(self._launched))
        try:
            self.slots.apply(plan)
        except PlanRejected:
            if not self._launched:
                raise
            self._learn_ends(most_unknown=0)
            self.slots.apply(plan)
        admitted, forked = [each.slot for each in plan.admissions], [fork.child_slot for fork in plan.forks]
        self._generations[plan.retired_slots.tolist() + admitted + forked] += 1
        self._generations[plan.branches[:, 0]] += 1
        if self._launched and self.slots.is_synchronous:
            self._learn_ends(most_unknown=0)
            self.slots.classify()

    def _learn_ends(self, *, most_unknown: int) -> None:
        """Marks slots as ended by the steps whose results are in. Waits until at most `most_unknown` are not.

        The rows of such a slot after its end were counted as computed, but the device has written nothing for them.
        """
        counters = self.slots.counters
        while self._launched and (len(self._launched) > most_unknown or self._launched[0].is_finished):
            launched = self._launched.popleft()
            launched.finish()
            ended, num_computed = launched.ended(self._generations)
            counters.has_ended[ended] = True
            counters.num_computed_tokens[ended] = np.minimum(counters.num_computed_tokens[ended], num_computed)

    def _all_succeed(self) -> bool:
        """Waits for all launched steps, and returns whether none of them has failed."""
        try:
            for launched in self._launched:
                launched.finish()
        except Exception:  # noqa: BLE001  # the results thread reports the error of the step
            return False
        return True

    def _changed_rows(self, step: StepInputs, bucket: int) -> Ints | None:
        """Returns the slots of a decode-only step, padded; None if the device has them from the step before."""
        slots = np.full(bucket, self._buffers.on_device.padding_slot, dtype=np.int32)
        slots[: len(step.slots)] = step.slots
        if self._device_rows is not None and np.array_equal(self._device_rows, slots):
            return None
        self._device_rows = slots
        return slots

    def _launch(self, prepared: PreparedStep) -> CudaLaunchedStep:
        sent = send(prepared.arrays, self._upload)
        # Set the mark only now: an idle device reaches it at once, and the time until then counts as idle time.
        start = self._accelerator.mark()
        prepare_ns = time.monotonic_ns() - prepared.started_ns
        self._buffers.on_device.apply(sent)
        if sent.copied_blocks is not None:
            copy_blocks(self._pool, *sent.copied_blocks)
        reports = Reports()
        if prepared.step.num_rows:
            forwarded, reports = self._compute(prepared, sent)
        else:
            forwarded = self._accelerator.mark()
            self._buffers.on_device.fork(sent.forked)
        is_live = np.isin(prepared.step.reporting, prepared.step.sampling)
        logprobs = with_overrun(self.slots, prepared.step.reporting, is_live, reports.logprobs)
        return self._fetch_results(prepared, start, forwarded, prepare_ns, replace(reports, logprobs=logprobs))

    def _compute(self, prepared: PreparedStep, sent: StepArrays[Tensor]) -> tuple[Mark, Reports]:
        """Launches model, sampler and ends. Returns the mark after the model, or after the graph if one runs all."""
        if prepared.bucket:
            if sent.decode_slots is not None:
                self._buffers.rows.slots[: prepared.bucket].copy_(sent.decode_slots)
            self.graphs.run(prepared.kind, prepared.bucket)
            forwarded = self._accelerator.mark()
            if prepared.kind is StepKind.GREEDY:
                return forwarded, Reports()
            num_rows = len(prepared.step.sampling)
            logits, slots = self._buffers.logits[:num_rows], self._buffers.rows.slots[:num_rows]
            return forwarded, self._sample(prepared, sent, slots, logits, None)
        if sent.mixed is None:
            raise ValueError("a step with rows is decode-only, or its rows are sent")
        hidden, logits = with_room(self._accelerator, partial(self._mixed, prepared.step, sent.mixed))
        forwarded = self._accelerator.mark()
        self._buffers.on_device.fork(sent.forked)
        return forwarded, self._sample(prepared, sent, sent.mixed.sampling, logits, hidden)

    def _mixed(self, step: StepInputs, rows: MixedRows[Tensor]) -> tuple[Tensor, Tensor]:
        """Returns the hidden states of a step that is not decode-only, and its logits but those of prompts."""
        hidden = self._forward.mixed(step.num_decodes, rows)
        return hidden, self._forward.model.logits(hidden[: step.first_prompt_logit])

    def _sample(
        self, prepared: PreparedStep, sent: StepArrays[Tensor], slots: Tensor, logits: Tensor, hidden: Tensor | None
    ) -> Reports:
        """Samples, ends sequences, and reports.

        logits: one row for each slot that samples, then one for each beam. hidden[L, hidden_size].
        """
        step, own = prepared.step, logits[: prepared.step.num_sampled_logits]
        if sent.mixed is not None and sent.mixed.sampled_logits is not None:
            own = own.index_select(0, sent.mixed.sampled_logits)
        if len(step.sampling):
            on_device, next_tokens = self._buffers.on_device, self._buffers.next_tokens[: len(step.sampling)]
            self._buffers.note_peaks(own)
            # Sampling overwrites banned logits, but reports and changes start from the model's own.
            scratch = own.clone() if step.is_synchronous else own
            sample(scratch, slots, on_device, sent.sampling, next_tokens)
            sample_changed(prepared.draw, own, slots, on_device, self._upload, next_tokens)
            self._buffers.close(slots)
        return self._report(step, own, logits[step.num_sampled_logits :], hidden) if step.is_synchronous else Reports()

    def _report(self, step: StepInputs, sampled: Tensor, beams: Tensor, hidden: Tensor | None) -> Reports:
        """Reports on sampled tokens, on beams, and on prompts.

        sampled[R, vocab_size]: the logits that were sampled. The logits of prompts are computed in pieces, from the
        last rows of hidden[L, hidden_size].
        """
        token_ids = self._buffers.next_tokens[: len(step.sampling)].cpu().numpy()
        pieces: list[Logprobs] = []
        if hidden is not None and len(prompts := hidden[step.first_prompt_logit :]):
            for rows in row_pieces(len(prompts), self.limits.vocab_size):
                piece = report_prompts(self.slots, self._forward.model.logits(prompts[rows]), rows)
                pieces += [] if piece is None else [piece]
        return Reports(
            logprobs=report_tokens(self.slots, step.sampling, sampled, token_ids),
            prompt_logprobs=join(pieces) if pieces else None,
            candidates=report_candidates(self.slots, step.beams, beams),
        )

    def _fetch_results(
        self, prepared: PreparedStep, start: Mark, forwarded: Mark, prepare_ns: int, reports: Reports
    ) -> CudaLaunchedStep:
        """Starts the copy of the results to the host."""
        num_rows, results = len(prepared.step.sampling), None
        # The next step may overwrite the buffer before its contents have reached the host.
        snapshot = self._buffers.results[:num_rows].clone() if num_rows else None
        end = arrived = self._accelerator.mark()
        if snapshot is not None:
            results = self._accelerator.host_bytes(snapshot.nbytes)
            arrived = self._accelerator.fetch(snapshot.view(-1).view(torch.uint8), results, end)
        marks = Marks(start, forwarded, end, self._previous_end)
        self._previous_end = end
        generations = self._generations[prepared.step.sampling]
        return CudaLaunchedStep(prepared, generations, results, arrived, marks, prepare_ns, reports, self._finite)

    def _graph_body(self, kind: StepKind, num_rows: int) -> Body:
        """Returns the work of a decode-only step on num_rows rows, as a function without parameters."""

        def body() -> None:
            logits = self._forward.decode(num_rows)
            if kind is StepKind.GREEDY:
                self._buffers.note_peaks(logits)
                choose_greedily(logits, self._buffers.next_tokens[:num_rows])
                self._buffers.close(self._buffers.rows.slots[:num_rows])
            else:
                self._buffers.logits[:num_rows].copy_(logits)

        return body
