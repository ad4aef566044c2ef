"""A small scheduler for tests: makes the plans for a runner, and checks the results against its own state."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from executor.plans.plan import Admission, EndReason, Fork, Ints, SequenceParams, StepOutput, StepPlan

if TYPE_CHECKING:
    import torch

    from executor.device.runner import ModelRunner
    from executor.slots.launch import Launch


def ints(*values: int) -> Ints:
    return np.array(values, dtype=np.int32)


def tuples(width: int, *values: tuple[int, ...]) -> Ints:
    return np.array(values, dtype=np.int32).reshape(-1, width)


@dataclass(slots=True, eq=False)
class DrivenSequence:
    """A sequence in a slot, as the driver knows it."""

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


class PlanDriver:
    """Drives a runner with plans that step all sequences together. Blocks are assigned in random order."""

    def __init__(self, runner: ModelRunner, epoch: int = 1) -> None:
        self.runner = runner
        self.limits = runner.limits
        self.epoch = epoch
        self.step_id = 0
        self.sequences: list[DrivenSequence] = []
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
    ) -> DrivenSequence:
        """Admits a sequence that generates `num_tokens` from the next step on. prefix: blocks of its first tokens."""
        sequence = DrivenSequence(
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
            Admission(
                sequence.slot, ints(*prompt), sequence.num_computed_tokens, ints(*sequence.block_table), sequence.params
            )
        )
        self.sequences.append(sequence)
        return sequence

    def retire(self, sequence: DrivenSequence, *, keep_blocks: bool = False) -> None:
        """Retires a sequence with the next plan, in which its slot and blocks can be reused."""
        self._retired.append(sequence.slot)
        self.free_slots.insert(0, sequence.slot)
        self.sequences.remove(sequence)
        if not keep_blocks:
            self.free_blocks += sequence.block_table

    def step(
        self,
        *,
        forks: tuple[Fork, ...] = (),
        copies: tuple[tuple[int, int], ...] = (),
        more: StepPlan | None = None,
        branches: tuple[tuple[DrivenSequence, DrivenSequence, int], ...] = (),
    ) -> StepOutput:
        """Runs one step of all sequences, with a plan of what has changed. `more` holds additional table updates.

        branches: (beam, its parent, token). Each gets copies of all blocks of its parent.
        """
        updates, counts = self._branch(branches), []
        copies += tuple(self._copied)
        for sequence in self.sequences:
            count = sequence.next_count
            needed = -(-(sequence.num_computed_tokens + count) // self.limits.block_size)
            while len(sequence.block_table) < needed:
                sequence.block_table.append(self.free_blocks.pop(0))
                updates.append((sequence.slot, len(sequence.block_table) - 1, sequence.block_table[-1]))
            if count != sequence.row_count:
                sequence.row_count = count
                counts.append((sequence.slot, count))
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
            branches=tuples(3, *((sequence.slot, parent.slot, token_id) for sequence, parent, token_id in branches)),
        )
        self._retired, self._admissions = [], []
        output = self.runner.execute(plan)
        self.outputs.append(output)
        self.free_blocks += self._released
        self._copied, self._released = [], []
        self._commit(output, forks)
        return output

    def fork(self, parent: DrivenSequence, *, seeds: tuple[int, ...]) -> list[DrivenSequence]:
        """Forks a sequence, copies the blocks of its children in the next step, and returns all sequences by slot.

        seeds: those of the children, and their slots
        """
        self.step(forks=tuple(Fork(parent.slot, seed, seed=seed) for seed in seeds))
        sequences = sorted(self.sequences, key=lambda sequence: sequence.slot)
        copies, updates = [], []
        for child in (each for each in sequences if each is not parent):
            for index, block in enumerate(child.block_table):
                copies.append((block, self.free_blocks.pop(0)))
                child.block_table[index] = copies[-1][1]
                updates.append((child.slot, index, copies[-1][1]))
        self.step(copies=tuple(copies), more=StepPlan(0, 0, table_updates=tuples(3, *updates)))
        return sequences

    def add_beam(self, sequence: DrivenSequence) -> DrivenSequence:
        """Returns a new sequence for a branch of a beam, without tokens yet."""
        beam = replace(sequence, slot=self.free_slots.pop(0), tokens=[], block_table=[], row_count=0)
        self.sequences.append(beam)
        return beam

    def _branch(self, branches: tuple[tuple[DrivenSequence, DrivenSequence, int], ...]) -> list[tuple[int, ...]]:
        """Applies branches and returns their table updates."""
        updates, before = [], {parent.slot: replace(parent) for _, parent, _ in branches}
        for sequence, parent, token_id in branches:
            source = before[parent.slot]
            self._released += sequence.block_table
            sequence.tokens, sequence.num_computed_tokens = [*source.tokens, token_id], source.num_computed_tokens
            sequence.block_table, sequence.row_count = [self.free_blocks.pop(0) for _ in source.block_table], 1
            self._copied += zip(source.block_table, sequence.block_table, strict=True)
            updates += [(sequence.slot, index, block) for index, block in enumerate(sequence.block_table)]
        return updates

    def run(self) -> None:
        """Runs steps until all sequences have ended. Each is retired with the plan after its end."""
        while self.sequences:
            self.step()
            for sequence in [sequence for sequence in self.sequences if sequence.reason]:
                self.retire(sequence)

    def _commit(self, output: StepOutput, forks: tuple[Fork, ...]) -> None:
        for sequence in self.sequences:
            sequence.num_computed_tokens += sequence.row_count
        reaching = [
            sequence
            for sequence in self.sequences
            if sequence.row_count and sequence.num_computed_tokens == len(sequence.tokens)
        ]
        sampled = [sequence for sequence in reaching if not sequence.params.num_candidates]
        values = iter(() if output.reports.candidates is None else output.reports.candidates.values.tolist())
        for sequence in sorted(reaching, key=lambda sequence: sequence.slot):
            if sequence.params.num_candidates:
                sequence.row_count = 0
                sequence.num_computed_tokens -= inf in list(islice(values, sequence.params.num_candidates))
        for fork in forks:
            parent = next(sequence for sequence in self.sequences if sequence.slot == fork.parent_slot)
            child = replace(
                parent,
                slot=fork.child_slot,
                tokens=list(parent.tokens),
                params=replace(parent.params, seed=fork.seed),
                block_table=list(parent.block_table),
                row_count=1,
            )
            self.free_slots.remove(child.slot)
            self.sequences.append(child)
            sampled.append(child)
        sampled.sort(key=lambda sequence: sequence.slot)
        assert len(output.token_ids) == len(output.end_reasons) == len(sampled)
        for sequence, token_id, reason in zip(
            sampled, output.token_ids.tolist(), output.end_reasons.tolist(), strict=True
        ):
            sequence.tokens.append(token_id)
            if not sequence.reason:
                sequence.reason = EndReason(reason)


def generate(
    runner: ModelRunner, prompts: list[list[int]], num_tokens: int, max_chunk: int = 1 << 20
) -> list[list[int]]:
    """Returns the greedy output of all prompts, computed together."""
    driver = PlanDriver(runner)
    sequences = [driver.admit(prompt, num_tokens, max_chunk=max_chunk) for prompt in prompts]
    driver.run()
    return [sequence.output for sequence in sequences]


def run_alone(runner: ModelRunner, prompt: list[int], **params: object) -> DrivenSequence:
    """Returns a sequence of up to 40 tokens that has run without others."""
    driver = PlanDriver(runner)
    sequence = driver.admit(prompt, 40, **params)
    driver.run()
    return sequence


class LogitsRecorder:
    """A wrapper of a runner's model that keeps the logits of the last step."""

    def __init__(self, runner: ModelRunner) -> None:
        self._model = runner.model
        self.pool = runner.model.pool
        self.last: torch.Tensor | None = None
        runner.model = self  # type: ignore[assignment]

    def forward(self, launch: Launch) -> torch.Tensor:
        self.last = self._model.forward(launch).clone()
        return self.last.clone()
