"""Random plan streams of a scheduler that does not know the results of its last plans yet."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field, replace

from executor.plans.plan import Admission, EndReason, Fork, SequenceParams, StepOutput, StepPlan
from tests.support.executor.plan_driver import ints, tuples


@dataclass(slots=True, eq=False)
class Sequence:
    """A sequence of the stream. Its numbers of tokens count as if it never ended, since its end is known late."""

    slot: int
    num_tokens: int
    params: SequenceParams
    max_chunk: int
    blocks: list[int]
    num_computed_tokens: int
    row_count: int = 0
    has_ended: bool = False

    @property
    def next_count(self) -> int:
        return 1 if self.has_ended else min(self.max_chunk, self.num_tokens - self.num_computed_tokens)

    @property
    def samples(self) -> bool:
        return self.num_computed_tokens + self.row_count == self.num_tokens


@dataclass(slots=True)
class RandomStream:
    """A stream of random plans: `plan` makes the next one, `learn` takes results in order, `seen` counts events.

    extras: sets of parameters. Each sequence gets one of them on top of its own.
    """

    limits: object
    seed: int
    epoch: int = 1
    extras: tuple[dict[str, object], ...] = ()
    step_id: int = 0
    running: list[Sequence] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    _refs: Counter[int] = field(default_factory=Counter)
    _reporting: deque[list[Sequence]] = field(default_factory=deque)
    _random: random.Random = field(init=False)
    _free_blocks: list[int] = field(init=False)
    _free_slots: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._free_blocks = list(range(1, self.limits.num_blocks))
        self._random.shuffle(self._free_blocks)
        self._free_slots = list(range(self.limits.max_num_seqs))

    def plan(self) -> StepPlan:
        retired = self._retire()
        admissions = [self._admit() for _ in range(self._random.choice((0, 0, 1, 2))) if self._free_slots]
        counts, updates, copies, budget = [], [], [], self.limits.max_num_batched_tokens
        for sequence in self.running:
            count = min(sequence.next_count, budget)
            budget -= count
            if not sequence.has_ended:
                self._extend(sequence, count, updates, copies)
            if count != sequence.row_count:
                sequence.row_count = count
                counts.append((sequence.slot, count))
            self.seen["row of a prompt" if count > 1 else "row of an ended one" if sequence.has_ended else "row"] += 1
        forks = self._compute()
        self.step_id += 1
        return StepPlan(
            self.epoch,
            self.step_id,
            retired_slots=ints(*retired),
            admissions=tuple(admissions),
            table_updates=tuples(3, *updates),
            block_copies=tuples(2, *copies),
            row_counts=tuples(2, *counts),
            forks=tuple(forks),
        )

    def learn(self, output: StepOutput) -> None:
        reporting = self._reporting.popleft()
        assert len(reporting) == len(output.token_ids) == len(output.end_reasons)
        for sequence, reason in zip(reporting, output.end_reasons.tolist(), strict=True):
            if reason:
                sequence.has_ended = True
                self.seen[EndReason(reason).name] += 1

    def _retire(self) -> list[int]:
        """Retires most sequences that have ended, and occasionally one that has not."""
        leaving = [one for one in self.running if self._random.random() < (0.6 if one.has_ended else 0.02)]
        for sequence in leaving:
            self.running.remove(sequence)
            self._free_slots.append(sequence.slot)
            for block in sequence.blocks:
                self._release(block)
        return [sequence.slot for sequence in leaving]

    def _admit(self) -> Admission:
        chance, limits = self._random, self.limits
        prompt = [chance.randrange(limits.vocab_size) for _ in range(chance.choice((1, 2, 4, 5, 9, 14)))]
        prefix = self._prefix(len(prompt))
        ids = [ints(*chance.sample(range(limits.vocab_size), chance.choice((0, 3, 40)))) for _ in range(2)]
        params = SequenceParams(
            max_total_tokens=len(prompt) + chance.choice((1, 3, 9, 20)),
            min_total_tokens=chance.choice((0, len(prompt) + 3)),
            temperature=chance.choice((0.0, 0.0, 0.7, 3.0)),
            top_k=chance.choice((0, 0, 1, 7, 10_000)),
            top_p=chance.choice((1.0, 1.0, 0.9, 0.2)),
            min_p=chance.choice((0.0, 0.0, 0.2)),
            seed=chance.randrange(1 << 64),
            eos_token_ids=ids[0],
            stop_token_ids=ids[1],
            num_prompt_tokens=len(prompt),
        )
        if self.extras:
            which = chance.randrange(len(self.extras))
            params = replace(params, **self.extras[which])
            self.seen[f"extra {which}"] += 1
        sequence = Sequence(
            slot=self._free_slots.pop(0),
            num_tokens=len(prompt),
            params=params,
            max_chunk=chance.choice((1, 3, 100)),
            blocks=prefix,
            num_computed_tokens=len(prefix) * limits.block_size,
        )
        self.running.append(sequence)
        self.seen["admitted with a prefix" if prefix else "admitted"] += 1
        return Admission(sequence.slot, ints(*prompt), sequence.num_computed_tokens, ints(*prefix), params)

    def _prefix(self, num_tokens: int) -> list[int]:
        """Returns full blocks of another sequence. Their contents do not matter, as both runners read the same."""
        for sequence in self.running:
            if self._random.random() < 0.3:
                # Not those of its output: it may have ended, and then the executor has not written them.
                num_written = min(sequence.num_computed_tokens, sequence.params.num_prompt_tokens)
                num_full = min(num_written, num_tokens - 1) // self.limits.block_size
                self._refs.update(sequence.blocks[:num_full])
                return sequence.blocks[:num_full]
        return []

    def _extend(self, sequence: Sequence, count: int, updates: list, copies: list) -> None:
        """Adds blocks for the next rows. A shared block that would be written is copied first."""
        first = sequence.num_computed_tokens // self.limits.block_size
        if count and first < len(sequence.blocks) and self._refs[sequence.blocks[first]] > 1:
            self._release(sequence.blocks[first])
            copies.append((sequence.blocks[first], self._take()))
            sequence.blocks[first] = copies[-1][1]
            updates.append((sequence.slot, first, copies[-1][1]))
            self.seen["copy"] += 1
        while len(sequence.blocks) * self.limits.block_size < sequence.num_computed_tokens + count:
            sequence.blocks.append(self._take())
            updates.append((sequence.slot, len(sequence.blocks) - 1, sequence.blocks[-1]))

    def _compute(self) -> list[Fork]:
        """Computes all rows, then forks some that sample. Ends by length are known without a result."""
        forks, reporting = [], []
        for sequence in list(self.running):
            is_overrun, samples = sequence.has_ended, sequence.row_count and sequence.samples
            if not is_overrun:
                sequence.num_computed_tokens += sequence.row_count
            if not (samples or (is_overrun and sequence.row_count)):
                continue
            reporting.append(sequence)
            if self._free_slots and self._random.random() < 0.08:
                reporting.append(self._fork(sequence, forks))
        for sequence in reporting:
            if not sequence.has_ended:
                sequence.num_tokens += 1
                sequence.has_ended = sequence.num_tokens >= sequence.params.max_total_tokens
        self._reporting.append(sorted(reporting, key=lambda sequence: sequence.slot))
        return forks

    def _fork(self, parent: Sequence, forks: list[Fork]) -> Sequence:
        fork = Fork(parent.slot, self._free_slots.pop(0), self._random.randrange(1 << 64))
        forks.append(fork)
        child = Sequence(
            slot=fork.child_slot,
            num_tokens=parent.num_tokens,
            params=parent.params,
            max_chunk=parent.max_chunk,
            blocks=list(parent.blocks),
            num_computed_tokens=parent.num_computed_tokens,
            row_count=1,
            has_ended=parent.has_ended,
        )
        self._refs.update(child.blocks)
        self.running.append(child)
        self.seen["fork of an ended one" if parent.has_ended else "fork"] += 1
        return child

    def _take(self) -> int:
        block = self._free_blocks.pop(0)
        self._refs[block] = 1
        return block

    def _release(self, block: int) -> None:
        self._refs[block] -= 1
        if not self._refs[block]:
            self._free_blocks.append(block)
