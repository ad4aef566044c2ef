"""A little scheduler for tests: builds the plans that a runner is driven with, and checks results against its books."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from executor.plans.plan import Admission, EndReason, Fork, Ints, SequenceParams, StepOutput, StepPlan

if TYPE_CHECKING:
    import torch

    from executor.device.runner import ModelRunner


def ints(*values: int) -> Ints:
    return np.array(values, dtype=np.int32)


def tuples(width: int, *values: tuple[int, ...]) -> Ints:
    return np.array(values, dtype=np.int32).reshape(-1, width)


@dataclass(slots=True, eq=False)
class Seat:
    """A sequence in a slot, as the conductor sees it."""

    slot: int
    tokens: list[int]
    num_prompt_tokens: int
    params: SequenceParams
    max_chunk: int
    block_table: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    row_count: int = 0
    reason: EndReason = EndReason.GOES_ON

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]

    @property
    def next_count(self) -> int:
        return min(self.max_chunk, len(self.tokens) - self.num_computed_tokens)


class Conductor:
    """Steps all its sequences together. Blocks are handed out in a random order."""

    def __init__(self, runner: ModelRunner, epoch: int = 1) -> None:
        self.runner = runner
        self.limits = runner.limits
        self.epoch = epoch
        self.step_id = 0
        self.seats: list[Seat] = []
        self.free_blocks = list(range(1, self.limits.num_blocks))
        random.Random(0).shuffle(self.free_blocks)
        self.free_slots = list(range(self.limits.max_num_seqs))
        self.outputs: list[StepOutput] = []
        self._copied: list[tuple[int, int]] = []
        self._released: list[int] = []
        self._retired: list[int] = []
        self._admissions: list[Admission] = []
        runner.reset()

    def admit(
        self,
        prompt: list[int],
        num_tokens: int,
        *,
        max_chunk: int = 1 << 20,
        prefix: list[int] | None = None,
        **params: object,
    ) -> Seat:
        """A sequence that generates `num_tokens`, from the next step on. prefix: blocks that hold its first tokens."""
        seat = Seat(
            slot=self.free_slots.pop(0),
            tokens=list(prompt),
            num_prompt_tokens=len(prompt),
            params=SequenceParams(  # type: ignore[arg-type]
                **{"max_total_tokens": len(prompt) + num_tokens, "num_prompt_tokens": len(prompt), **params}
            ),
            max_chunk=max_chunk,
            block_table=list(prefix or []),
            num_computed_tokens=len(prefix or []) * self.limits.block_size,
        )
        self._admissions.append(
            Admission(seat.slot, ints(*prompt), seat.num_computed_tokens, ints(*seat.block_table), seat.params)
        )
        self.seats.append(seat)
        return seat

    def retire(self, seat: Seat, *, keep_blocks: bool = False) -> None:
        """With the next step's plan; its slot and blocks can be used again from that plan on."""
        self._retired.append(seat.slot)
        self.free_slots.insert(0, seat.slot)
        self.seats.remove(seat)
        if not keep_blocks:
            self.free_blocks += seat.block_table

    def step(
        self,
        *,
        forks: tuple[Fork, ...] = (),
        copies: tuple[tuple[int, int], ...] = (),
        more: StepPlan | None = None,
        branches: tuple[tuple[Seat, Seat, int], ...] = (),
    ) -> StepOutput:
        """One step of everybody, with only what changed in the plan. `more` replaces nothing but the table updates.

        branches: (beam, its parent, token); each gets copies of all of its parent's blocks.
        """
        updates, counts = self._branch(branches), []
        copies += tuple(self._copied)
        for seat in self.seats:
            count = seat.next_count
            needed = -(-(seat.num_computed_tokens + count) // self.limits.block_size)
            while len(seat.block_table) < needed:
                seat.block_table.append(self.free_blocks.pop(0))
                updates.append((seat.slot, len(seat.block_table) - 1, seat.block_table[-1]))
            if count != seat.row_count:
                seat.row_count = count
                counts.append((seat.slot, count))
        if more is not None:
            updates += [tuple(update) for update in more.table_updates.tolist()]
        self.step_id += 1
        plan = StepPlan(
            epoch=self.epoch,
            step_id=self.step_id,
            retired_slots=ints(*self._retired),
            admissions=tuple(self._admissions),
            table_updates=tuples(3, *updates),
            block_copies=tuples(2, *copies),
            row_counts=tuples(2, *counts),
            forks=forks,
            branches=tuples(3, *((seat.slot, parent.slot, token_id) for seat, parent, token_id in branches)),
        )
        self._retired, self._admissions = [], []
        output = self.runner.execute(plan)
        self.outputs.append(output)
        self.free_blocks += self._released
        self._copied, self._released = [], []
        self._commit(output, forks)
        return output

    def beam_of(self, seat: Seat) -> Seat:
        """A place for a branch of a beam, without tokens yet."""
        beam = replace(seat, slot=self.free_slots.pop(0), tokens=[], block_table=[], row_count=0)
        self.seats.append(beam)
        return beam

    def _branch(self, branches: tuple[tuple[Seat, Seat, int], ...]) -> list[tuple[int, ...]]:
        """Table updates."""
        updates, before = [], {parent.slot: replace(parent) for _, parent, _ in branches}
        for seat, parent, token_id in branches:
            source = before[parent.slot]
            self._released += seat.block_table
            seat.tokens, seat.num_computed_tokens = [*source.tokens, token_id], source.num_computed_tokens
            seat.block_table, seat.row_count = [self.free_blocks.pop(0) for _ in source.block_table], 1
            self._copied += zip(source.block_table, seat.block_table, strict=True)
            updates += [(seat.slot, index, block) for index, block in enumerate(seat.block_table)]
        return updates

    def run(self) -> None:
        """Until all have ended; whoever ends is retired with the next plan."""
        while self.seats:
            self.step()
            for seat in [seat for seat in self.seats if seat.reason]:
                self.retire(seat)

    def _commit(self, output: StepOutput, forks: tuple[Fork, ...]) -> None:
        for seat in self.seats:
            seat.num_computed_tokens += seat.row_count
        reaching = [seat for seat in self.seats if seat.row_count and seat.num_computed_tokens == len(seat.tokens)]
        sampled = [seat for seat in reaching if not seat.params.num_candidates]
        for seat in reaching:
            if seat.params.num_candidates:
                seat.row_count = 0
        for fork in forks:
            parent = next(seat for seat in self.seats if seat.slot == fork.parent_slot)
            child = replace(
                parent,
                slot=fork.child_slot,
                tokens=list(parent.tokens),
                params=replace(parent.params, seed=fork.seed),
                block_table=list(parent.block_table),
                row_count=1,
            )
            self.free_slots.remove(child.slot)
            self.seats.append(child)
            sampled.append(child)
        sampled.sort(key=lambda seat: seat.slot)
        assert len(output.token_ids) == len(output.end_reasons) == len(sampled)
        for seat, token_id, reason in zip(sampled, output.token_ids.tolist(), output.end_reasons.tolist(), strict=True):
            seat.tokens.append(token_id)
            if not seat.reason:
                seat.reason = EndReason(reason)


def generate(
    runner: ModelRunner, prompts: list[list[int]], num_tokens: int, max_chunk: int = 1 << 20
) -> list[list[int]]:
    """Greedy output of all prompts, computed together."""
    conductor = Conductor(runner)
    seats = [conductor.admit(prompt, num_tokens, max_chunk=max_chunk) for prompt in prompts]
    conductor.run()
    return [seat.output for seat in seats]


class LogitsRecorder:
    """Stands in front of a runner's model and keeps the logits of the last step."""

    def __init__(self, runner: ModelRunner) -> None:
        self._model = runner.model
        self.pool = runner.model.pool
        self.last: torch.Tensor | None = None
        runner.model = self  # type: ignore[assignment]

    def forward(self, step: object, rows: object, block_tables: object) -> torch.Tensor:
        self.last = self._model.forward(step, rows, block_tables).clone()  # type: ignore[arg-type]
        return self.last.clone()
