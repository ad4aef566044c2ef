"""Random plans over several leases, and a naive model of the KV pool that knows which lease has written each token.

The plans have everything that a plan can have, and follow no rules but those without which nearly all would be refused.
The executor's checks refuse some; the model carries out the others, and finds what they let through.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np

from executor.errors import PlanRejected
from executor.plans.limits import PlanLimits
from executor.plans.plan import Admission, Fork, Publication, SequenceParams, StepPlan
from executor.slots.slots import Slots
from executor.slots.step_inputs import begin_step
from quire.plan_stream import DIGEST_BYTES
from tests.support.executor.plan_driver import ints, tuples

LIMITS = PlanLimits(
    vocab_size=100, max_model_len=12, block_size=3, num_blocks=7, max_num_seqs=4, max_num_batched_tokens=12
)
SIZE, BLOCKS, MOST_BLOCKS, EOS = LIMITS.block_size, range(1, LIMITS.num_blocks), 4, 50

Mark = tuple[int, int]
"""Which lease has written a token, and in which write."""


class Leak(AssertionError):
    """A lease reads, or publishes, what another one has written."""


@dataclass
class Row:
    """The sequence in a slot."""

    table: list[int]
    num_computed: int
    num_tokens: int
    is_beam: bool
    num_rows: int = 0
    has_ended: bool = False

    def copy(self, **changes: int) -> Row:
        return replace(self, table=list(self.table), **changes)  # type: ignore[arg-type]


@dataclass
class Draft:
    """A plan that is being drawn: the slots as they will be, and its parts."""

    rows: dict[int, Row]
    free: list[int]
    admissions: list[Admission] = field(default_factory=list)
    branches: list[tuple[int, int, int]] = field(default_factory=list)
    updates: dict[tuple[int, int], int] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    forks: list[Fork] = field(default_factory=list)


class LeaseWorld:
    """`step` draws a plan; raises Leak if the executor accepts one that reads another lease's KV."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._slots = Slots(LIMITS)
        self._rows: dict[int, Row] = {}
        self._marks: dict[tuple[int, int], Mark] = {
            (b, i): (0, 0) for b in range(LIMITS.num_blocks) for i in range(SIZE)
        }
        self._published: dict[int, tuple[Mark, ...]] = {}
        self._writes = count(1)
        self._lease = 0
        self.num_accepted = 0
        self._begin_lease()

    def step(self) -> None:
        if self._random.random() < 0.03:
            self._begin_lease()
        plan = self._draw()
        try:
            self._slots.apply(plan)
        except PlanRejected:
            return
        self.num_accepted += 1
        self._carry_out(plan)
        sampling = begin_step(self._slots, plan.forks).sampling
        if sampling.size:
            tokens = np.array([self._random.choice((EOS, 1, 2, 3)) for _ in sampling], np.int32)
            for slot, reason in zip(sampling.tolist(), self._slots.append(sampling, tokens).tolist(), strict=True):
                self._rows[slot].num_tokens += 1
                self._rows[slot].has_ended = bool(reason)
        for slot, row in self._rows.items():
            assert row.num_computed == self._slots.counters.num_computed_tokens[slot]
            assert row.has_ended == self._slots.counters.has_ended[slot]

    def _begin_lease(self) -> None:
        self._lease += 1
        self._scheme = self._random.choice(("s", "s", "t", ""))
        retained = self._slots.clear(self._scheme).blocks.tolist()
        for block in retained:
            if self._published.get(block) != self._content(block):
                raise Leak(f"block {block} was retained, and is not what was published")
        self._published = {block: self._published[block] for block in retained}
        self._shared = {mark for marks in self._published.values() for mark in marks}
        self._rows = {}

    def _content(self, block: int) -> tuple[Mark, ...]:
        return tuple(self._marks[block, i] for i in range(SIZE))

    def _may_read(self, mark: Mark) -> bool:
        return mark[0] == self._lease or mark in self._shared

    # --- drawing a plan ---------------------------------------------------------------------------------------

    def _draw(self) -> StepPlan:
        chance = self._random.random
        retired = [slot for slot in self._rows if chance() < 0.12]
        rows = {slot: row.copy() for slot, row in self._rows.items() if slot not in retired}
        draft = Draft(rows, [slot for slot in range(LIMITS.max_num_seqs) if slot not in rows])
        if draft.free and chance() < 0.45:
            self._admit(draft)
        self._branch(draft)
        self._count_rows(draft)
        self._update_tables(draft)
        self._fork(draft)
        copies: list[tuple[int, int]] = []
        if chance() < 0.25:
            destinations = self._random.sample(BLOCKS, self._random.choice((1, 1, 2)))
            sources = [block for block in BLOCKS if block not in destinations]
            copies = [(self._random.choice(sources), block) for block in destinations]
        published = self._random.sample(BLOCKS, self._random.choice((1, 2))) if self._scheme and chance() < 0.3 else []
        return StepPlan(
            1,
            1,
            retired_slots=ints(*retired),
            admissions=tuple(draft.admissions),
            branches=tuples(3, *draft.branches),
            table_updates=tuples(3, *((slot, place, block) for (slot, place), block in draft.updates.items())),
            block_copies=tuples(2, *copies),
            row_counts=tuples(2, *draft.counts.items()),
            forks=tuple(draft.forks),
            published=Publication(ints(*published), bytes(DIGEST_BYTES * len(published))),
            withdrawn_blocks=ints(*(block for block in BLOCKS if chance() < 0.05)),
        )

    def _admit(self, draft: Draft) -> None:
        pick = self._random
        slot, num_tokens = draft.free.pop(pick.randrange(len(draft.free))), pick.randrange(1, 8)
        num_computed = pick.choice((0, 0, pick.randrange(num_tokens), pick.randrange(num_tokens)))
        num_blocks = pick.choice((-(-num_computed // SIZE), -(-num_tokens // SIZE), pick.randrange(MOST_BLOCKS + 1)))
        table = [pick.choice(BLOCKS) for _ in range(min(num_blocks, MOST_BLOCKS))]
        params = SequenceParams(
            max_total_tokens=pick.randrange(num_tokens + 1, LIMITS.max_model_len + 1),
            eos_token_ids=ints(EOS),
            num_prompt_tokens=num_tokens,
            num_candidates=pick.choice((0, 0, 2)),
        )
        draft.admissions.append(Admission(slot, ints(*[1] * num_tokens), num_computed, ints(*table), params))
        draft.rows[slot] = Row(table, num_computed, num_tokens, params.num_candidates > 0)

    def _branch(self, draft: Draft) -> None:
        parents = {s: row.copy() for s, row in draft.rows.items() if row.is_beam and row.num_computed == row.num_tokens}
        if not parents or self._random.random() < 0.2:
            return
        chosen = [slot for slot in parents if self._random.random() < 0.7]
        chosen += [slot for slot in draft.free if self._random.random() < 0.4]
        for slot in chosen:
            parent = self._random.choice(list(parents))
            draft.branches.append((slot, parent, 5))
            draft.rows[slot] = parents[parent].copy(num_tokens=parents[parent].num_tokens + 1, num_rows=1)
        draft.free = [slot for slot in draft.free if slot not in chosen]

    def _count_rows(self, draft: Draft) -> None:
        for slot, row in draft.rows.items():
            num_left = 1 if row.has_ended else row.num_tokens - row.num_computed
            if (row.num_rows > num_left and not row.has_ended) or self._random.random() < 0.3:
                draft.counts[slot] = row.num_rows = self._random.randrange(num_left + 1)

    def _update_tables(self, draft: Draft) -> None:
        for slot, row in draft.rows.items():
            needed = row.num_computed + row.num_rows if row.num_rows and not row.has_ended else 0
            while len(row.table) * SIZE < needed and len(row.table) < MOST_BLOCKS:
                draft.updates[slot, len(row.table)] = self._random.choice(BLOCKS)
                row.table.append(0)
            if row.table and self._random.random() < 0.15:
                draft.updates[slot, self._random.randrange(len(row.table))] = self._random.choice(BLOCKS)

    def _fork(self, draft: Draft) -> None:
        for slot, row in draft.rows.items():
            samples = row.has_ended or row.num_computed + row.num_rows == row.num_tokens
            if row.num_rows and not row.is_beam and samples and draft.free and self._random.random() < 0.35:
                draft.forks.append(Fork(slot, draft.free.pop(), 7))

    # --- carrying it out --------------------------------------------------------------------------------------

    def _carry_out(self, plan: StepPlan) -> None:
        for block in plan.withdrawn_blocks.tolist():
            self._published.pop(block, None)
        for block in plan.published.blocks.tolist():
            if not all(map(self._may_read, self._content(block))):
                raise Leak(f"block {block} is published, and another lease has written it")
            self._published[block] = self._content(block)
        for slot in plan.retired_slots.tolist():
            del self._rows[slot]
        for each in plan.admissions:
            is_beam = each.params.num_candidates > 0
            self._rows[each.slot] = Row(
                each.block_table.tolist(), each.num_computed_tokens, len(each.token_ids), is_beam
            )
        before = {slot: row.copy() for slot, row in self._rows.items()}
        for slot, parent, _ in plan.branches.tolist():
            self._rows[slot] = before[parent].copy(num_tokens=before[parent].num_tokens + 1, num_rows=1)
        for slot, place, block in sorted(plan.table_updates.tolist()):
            self._rows[slot].table[place : place + 1] = [block]
        marks = dict(self._marks)
        for source, destination in plan.block_copies.tolist():
            self._marks |= {(destination, i): marks[source, i] for i in range(SIZE)}
        for slot, number in plan.row_counts.tolist():
            self._rows[slot].num_rows = number
        self._compute()
        for each in plan.forks:
            self._rows[each.child_slot] = self._rows[each.parent_slot].copy(num_rows=1)

    def _compute(self) -> None:
        """All rows write before any row attends, as in a step."""
        computing = {slot: row for slot, row in self._rows.items() if row.num_rows and not row.has_ended}
        for row in computing.values():
            write = next(self._writes)
            for position in range(row.num_computed, row.num_computed + row.num_rows):
                self._marks[row.table[position // SIZE], position % SIZE] = self._lease, write
        for slot, row in computing.items():
            row.num_computed += row.num_rows
            for position in range(row.num_computed):
                if not self._may_read(self._marks[row.table[position // SIZE], position % SIZE]):
                    raise Leak(f"slot {slot} attends to position {position}, which another lease has written")
            if row.is_beam and row.num_computed == row.num_tokens:
                row.num_rows = 0
