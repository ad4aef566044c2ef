"""One step on a GPU: launched here, and finished when its result has arrived.

    host     │ check, books │ launch n │ check, books │ launch n + 1 │ …
    device                  │ deltas, rows, model, sampler, ends: n  │ n + 1 │ …
    results                                                  n copied out │ finish n

The host never waits for a result in order to launch. What it lacks, the last tokens and who has ended, is on the
device. The exception are steps in which logits are changed, or more is reported than tokens: such a step waits for
those before it, and for its own result.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
import torch
from torch import Tensor

from executor.cuda.accelerator import Accelerator, Body, Mark
from executor.cuda.device_slots import DeviceSlots, fork_deltas, slot_deltas
from executor.cuda.forward import DecodeRows, Forward
from executor.cuda.graphs import Graphs
from executor.cuda.host_step import HostStep, take_step
from executor.cuda.launched import LaunchedStep, Marks
from executor.cuda.sampler import MAX_NUMBERS, Recipe, sample
from executor.cuda.upload import Arrays, Upload
from executor.errors import PlanRejected
from executor.models.decoder import Decoder
from executor.plans.limits import Limits
from executor.plans.plan import EndReason, Ints, Logprobs, Reports, StepPlan
from executor.sampling.logprobs import join, row_pieces
from executor.sampling.reports import report_candidates, report_prompts, report_tokens, with_overrun
from executor.slots.sampling_table import Draw
from executor.slots.slots import Slots
from kernels import AttentionShape
from kernels.triton import RESULT_FIELDS, DecodePlanner, choose_greedily, close_rows, copy_blocks

_log = logging.getLogger(__name__)


class StepKind(Enum):
    """What a graph holds: the model alone, or a whole step whose rows are all greedy."""

    FORWARD = "forward"
    GREEDY = "greedy"


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """Device memory that lives as long as the runner, and is taken before the KV pool takes what is left.

    logits[max_num_seqs, vocab_size] of decode steps that sample, one buffer for all of their graphs;
    next_tokens[max_num_seqs] and results[max_num_seqs, RESULT_FIELDS], int32.
    """

    on_device: DeviceSlots
    planner: DecodePlanner
    rows: DecodeRows
    logits: Tensor
    next_tokens: Tensor
    results: Tensor

    @classmethod
    def allocate(
        cls, model: Decoder, shape: AttentionShape, max_num_seqs: int, max_model_len: int, device: torch.device
    ) -> "StepBuffers":
        config = model.config
        max_blocks_per_seq = -(-max_model_len // shape.block_size)
        return cls(
            on_device=DeviceSlots(max_num_seqs, max_blocks_per_seq, config.vocab_size, device),
            planner=DecodePlanner(shape, device, max_num_seqs, max_model_len, config.windows),
            rows=DecodeRows(max_num_seqs, device),
            logits=torch.zeros((max_num_seqs, config.vocab_size), dtype=model.dtype, device=device),
            next_tokens=torch.zeros(max_num_seqs, dtype=torch.int32, device=device),
            results=torch.zeros((max_num_seqs, RESULT_FIELDS), dtype=torch.int32, device=device),
        )

    @property
    def num_bytes(self) -> int:
        """The rows are too small to count."""
        return self.on_device.num_bytes + self.planner.num_bytes + self.logits.nbytes


class CudaRunner:
    """The model, its KV pool and the slots, on the host and on the device. One thread launches at a time."""

    def __init__(
        self,
        model: Decoder,
        shape: AttentionShape,
        buffers: StepBuffers,
        pool: Tensor,
        limits: Limits,
        accelerator: Accelerator,
    ) -> None:
        self.limits = limits
        self.slots = Slots(limits)
        self._pool = pool
        self._buffers = buffers
        self._forward = Forward(model, pool, shape, buffers.planner, buffers.on_device, buffers.rows)
        self._accelerator = accelerator
        self._upload = Upload(accelerator)
        self.graphs = Graphs(accelerator, limits.max_num_seqs, self._graph_body)
        # The rows that the device has in buffers.rows.slots; None: it is not known.
        self._rows_there: Ints | None = None
        self._lives = np.zeros(limits.max_num_seqs, dtype=np.int64)
        self._launched: deque[LaunchedStep] = deque()
        self._previous_end: Mark | None = None

    def reset(self) -> None:
        """A new epoch: all slots are empty. The KV pool keeps what it holds; steps under way are finished by others."""
        self.slots.clear()
        self._launched.clear()
        self._rows_there = None  # a step that failed may have noted rows that were never sent
        self._lives += 1

    def captures(self) -> Iterator[None]:
        """Captures the graphs that no step has needed yet, one a turn: steps that come later do not wait for it.

        The largest first, in whose memory the others find room. Where the device has no more of it, the rest is left
        to the steps that need it.
        """
        for bucket in reversed(self.graphs.buckets):
            for kind in StepKind:
                if not self.graphs.needs_capture(kind, bucket):
                    continue
                try:
                    with torch.inference_mode(), self._accelerator.working():
                        self._capture(kind, bucket)
                except torch.OutOfMemoryError as error:
                    _log.warning("no memory for a graph of %d sequences ahead of time: %s", bucket, error)
                    return
                yield

    @torch.inference_mode()
    def execute(self, plan: StepPlan, computing: Callable[[], None] = lambda: None) -> LaunchedStep:
        """Launches one step. Raises PlanRejected, and then nothing has changed. computing: called before the launch."""
        started_ns = time.monotonic_ns()
        with self._accelerator.working():
            self._accept(plan)
            step = take_step(self.slots, plan.forks)
            computing()
            launched = self._launch(plan, step, started_ns)
            if step.has_reports:
                self.slots.append(step.sampling, launched.sampled())
        self._launched.append(launched)
        return launched

    def _accept(self, plan: StepPlan) -> None:
        """Checks the plan and applies it to the books. Raises PlanRejected.

        The books may not know yet that a sequence has ended, and what is allowed for an ended one may look wrong. So a
        plan that looks wrong is looked at again when all results are in.
        """
        self._learn(waits=False)
        try:
            self.slots.apply(plan)
        except PlanRejected:
            if not self._launched:
                raise
            self._learn(waits=True)
            self.slots.apply(plan)
        begun = [*plan.retired_slots.tolist()]
        begun += [admission.slot for admission in plan.admissions] + [fork.child_slot for fork in plan.forks]
        self._lives[begun] += 1
        self._lives[plan.branches[:, 0]] += 1
        if self._launched and self.slots.wants_reports:
            self._learn(waits=True)
            self.slots.sort_out()

    def _learn(self, *, waits: bool) -> None:
        """Who has ended, from the steps whose results are in; or from all steps."""
        while self._launched and (waits or self._launched[0].is_finished):
            launched = self._launched.popleft()
            launched.finish()
            self.slots.counters.has_ended[launched.ended(self._lives)] = True

    def _launch(self, plan: StepPlan, step: HostStep, started_ns: int) -> LaunchedStep:
        recipe = Recipe.of(step.draw)
        is_decode_only = step.is_decode_only
        bucket = self.graphs.bucket(len(step.order)) if is_decode_only else 0
        kind = StepKind.GREEDY if recipe.is_plain_greedy and not step.has_reports else StepKind.FORWARD
        if is_decode_only and self.graphs.needs_capture(kind, bucket):
            self._capture(kind, bucket)
        arrays = slot_deltas(plan, self.limits) | fork_deltas(plan.forks)
        if plan.block_copies.size:
            arrays["copied_blocks"] = np.ascontiguousarray(plan.block_copies.T, dtype=np.int64)
        if is_decode_only:
            arrays |= self._changed_rows(step, bucket)
        elif len(step.order):
            arrays |= self._forward.mixed_rows(step, self.slots) | {"sampling": step.sampling}

        arrays |= recipe.arrays()

        sent = self._upload.send(arrays) if arrays else {}
        # Not before: a device that has nothing to do reaches a mark at once, and what we do until then is its idleness.
        start = self._accelerator.mark()
        prepared_ns = time.monotonic_ns()
        self._buffers.on_device.apply(sent)
        if "copied_blocks" in sent:
            copy_blocks(self._pool, *sent["copied_blocks"])
        reports = Reports()
        if len(step.order):
            forwarded, reports = self._compute(step, kind, bucket, recipe, sent)
        else:
            forwarded = self._accelerator.mark()
            self._buffers.on_device.fork(sent)
        is_live = np.isin(step.reporting, step.sampling)
        reports = replace(reports, logprobs=with_overrun(self.slots, step.reporting, is_live, reports.logprobs))
        return self._finishing(plan, step, start, forwarded, prepared_ns - started_ns, reports)

    def _changed_rows(self, step: HostStep, bucket: int) -> Arrays:
        """The slots of a decode step, padded; nothing if they are the last step's."""
        slots = np.full(bucket, self._buffers.on_device.padding_slot, dtype=np.int32)
        slots[: len(step.order)] = step.order
        if self._rows_there is not None and np.array_equal(self._rows_there, slots):
            return {}
        self._rows_there = slots
        return {"decode_slots": slots}

    def _compute(
        self, step: HostStep, kind: StepKind, bucket: int, recipe: Recipe, sent: dict[str, Tensor]
    ) -> tuple[Mark, Reports]:
        """Model, sampler and ends. Returns the mark between the first two; a whole step in a graph has none."""
        buffers, num_rows, model = self._buffers, len(step.sampling), self._forward.model
        num_logits = num_rows + len(step.beams)
        hidden: Tensor | None = None
        if bucket:
            if "decode_slots" in sent:
                buffers.rows.slots[:bucket].copy_(sent["decode_slots"])
            self.graphs.run(kind, bucket)
            logits, slots = buffers.logits, buffers.rows.slots
            forwarded = self._accelerator.mark()
            if kind is StepKind.GREEDY:
                return forwarded, Reports()
        else:
            hidden, slots = self._forward.mixed(step.num_decodes, sent), sent["sampling"]
            logits = model.logits(hidden[:num_logits])
            forwarded = self._accelerator.mark()
            buffers.on_device.fork(sent)
        reports = Reports()
        if num_rows:
            next_tokens, slots = buffers.next_tokens[:num_rows], slots[:num_rows]
            # Banned logits are lost, but what is reported is the model's.
            own = logits[:num_rows].clone() if step.has_reports else logits[:num_rows]
            sample(own, slots, buffers.on_device, recipe, sent, next_tokens)
            if step.draw.changes is not None:
                self._sample_changed(step.draw, logits, slots, next_tokens)
            self._close(slots)
        if step.has_reports:
            prompts = None if hidden is None else hidden[num_logits:]
            reports = self._report(step, logits[:num_logits], prompts)
        return forwarded, reports

    def _sample_changed(self, draw: Draw, logits: Tensor, slots: Tensor, next_tokens: Tensor) -> None:
        """Rows that change their logits once more: mutates next_tokens."""
        on_device = self._buffers.on_device
        for part in draw.changes.parts(MAX_NUMBERS) if draw.changes is not None else ():
            recipe = Recipe.of(draw.unchanged(part.rows))
            sent = self._upload.send(recipe.arrays() | {"changed_rows": part.rows.astype(np.int64)})
            rows = sent["changed_rows"]
            token_ids = torch.empty(len(rows), dtype=torch.int32, device=rows.device)
            sample(part.changed(logits), slots.index_select(0, rows), on_device, recipe, sent, token_ids)
            next_tokens.index_copy_(0, rows, token_ids)

    def _report(self, step: HostStep, logits: Tensor, prompts: Tensor | None) -> Reports:
        """Of logits[sampling, then beams], and of prompts[rows, hidden_size]: their logits are made in pieces."""
        slots, num_rows = self.slots, len(step.sampling)
        token_ids = self._buffers.next_tokens[:num_rows].cpu().numpy()
        pieces: list[Logprobs] = []
        if prompts is not None and len(prompts):
            for rows in row_pieces(len(prompts), self.limits.vocab_size):
                piece = report_prompts(slots, self._forward.model.logits(prompts[rows]), rows)
                pieces += [] if piece is None else [piece]
        return Reports(
            logprobs=report_tokens(slots, step.sampling, logits[:num_rows], token_ids),
            prompt_logprobs=join(pieces) if pieces else None,
            candidates=report_candidates(slots, step.beams, logits[num_rows:]),
        )

    def _finishing(
        self, plan: StepPlan, step: HostStep, start: Mark, forwarded: Mark, prepare_ns: int, reports: Reports
    ) -> LaunchedStep:
        """Sends the results on their way to the host."""
        num_rows, results = len(step.sampling), None
        # The next step writes to the buffer again, maybe before this copy of it is on the host.
        snapshot = self._buffers.results[:num_rows].clone() if num_rows else None
        end = arrived = self._accelerator.mark()
        if snapshot is not None:
            results = self._accelerator.host_bytes(snapshot.nbytes)
            arrived = self._accelerator.fetch(snapshot.view(-1).view(torch.uint8), results, end)
        marks = Marks(start, forwarded, end, self._previous_end)
        self._previous_end = end
        lives = self._lives[step.sampling]
        return LaunchedStep(plan, step.reporting, step.sampling, lives, results, arrived, marks, prepare_ns, reports)

    def _capture(self, kind: StepKind, bucket: int) -> None:
        """On rows of padding: the run before the capture changes nothing."""
        self._buffers.rows.slots.fill_(self._buffers.on_device.padding_slot)
        self._rows_there = None
        self.graphs.capture(kind, bucket)

    def _graph_body(self, kind: Hashable, num_rows: int) -> Body:
        """The work of a decode step on so many rows, as one function of nothing."""

        def body() -> None:
            logits = self._forward.decode(num_rows)
            if kind is StepKind.GREEDY:
                choose_greedily(logits, self._buffers.next_tokens[:num_rows])
                self._close(self._buffers.rows.slots[:num_rows])
            else:
                self._buffers.logits[:num_rows].copy_(logits)

        return body

    def _close(self, slots: Tensor) -> None:
        """next_tokens become the last tokens of the slots, and the step's results."""
        buffers, num_rows = self._buffers, len(slots)
        close_rows(
            buffers.on_device.states,
            buffers.on_device.end_kinds,
            slots,
            buffers.next_tokens[:num_rows],
            buffers.results[:num_rows],
            EndReason.LENGTH,
        )
