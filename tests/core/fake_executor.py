"""An executor in plain Python: it keeps the plan stream's contract to the letter and has no weights.

Its "KV" makes mistakes visible. The entry of a token is a hash of the token and of *every entry before it, read through
the block table*; the sampled token is a hash of all entries and the seed. So one stale, missing, unshared or overwritten
block anywhere changes what comes out, and `expected_output` says what should have.
"""

from dataclasses import dataclass, field
from zlib import crc32

from scheduler.core import FinishReason, SequenceParams, StepPlan, StepResult


def _entry(entries: list[int], token_id: int) -> int:
    return crc32(repr((token_id, entries)).encode())


def _sample(entries: list[int], seed: int, vocab_size: int) -> int:
    return crc32(repr((entries, seed)).encode()) % vocab_size


def _end_reason(params: SequenceParams, token_id: int, num_tokens: int) -> FinishReason | None:
    if num_tokens >= params.min_total_tokens:
        if token_id in params.eos_token_ids:
            return FinishReason.EOS
        if token_id in params.stop_token_ids:
            return FinishReason.STOP
    return FinishReason.LENGTH if num_tokens >= params.max_total_tokens else None


def expected_output(
    prompt: list[int], params: SequenceParams, seed: int, vocab_size: int
) -> tuple[list[int], FinishReason]:
    """What a sequence must generate whatever happens around it, and how it ends."""
    entries: list[int] = []
    for token_id in prompt:
        entries.append(_entry(entries, token_id))
    output: list[int] = []
    while True:
        token_id = _sample(entries, seed, vocab_size)
        output.append(token_id)
        reason = _end_reason(params, token_id, len(prompt) + len(output))
        if reason:
            return output, reason
        entries.append(_entry(entries, token_id))


class PlanError(Exception):
    """The plan breaks a rule of the plan stream."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise PlanError(message)


@dataclass
class Slot:
    token_ids: list[int]
    num_computed_tokens: int
    block_table: list[int]
    params: SequenceParams
    seed: int
    row_count: int = 0
    has_ended: bool = False


@dataclass
class FakeExecutor:
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int
    epoch: int
    step_id: int = 0
    slots: dict[int, Slot] = field(default_factory=dict)
    num_rows_computed: int = 0

    def __post_init__(self) -> None:
        self.kv: list[list[int | None]] = [[None] * self.block_size for _ in range(self.num_blocks)]

    def execute(self, plan: StepPlan) -> StepResult:
        require(plan.epoch == self.epoch, f"epoch {plan.epoch}, not {self.epoch}")
        require(plan.step_id == self.step_id + 1, f"step {plan.step_id} after {self.step_id}")
        self.step_id = plan.step_id
        self._apply(plan)
        sampled: dict[int, tuple[int, FinishReason | None]] = {}
        contexts: dict[int, list[int]] = {}
        require(sum(slot.row_count for slot in self.slots.values()) <= self.max_num_batched_tokens, "over the budget")
        require(any(slot.row_count for slot in self.slots.values()), "a plan without rows")
        for index, slot in sorted(self.slots.items()):
            if slot.row_count == 0:
                continue
            self.num_rows_computed += 1
            if slot.has_ended:
                sampled[index] = (0, None)
                continue
            self._compute(slot)
            if slot.num_computed_tokens == len(slot.token_ids):
                contexts[index] = self._read(slot)
        for fork in plan.forks:
            require(fork.parent_slot in contexts, f"slot {fork.parent_slot} does not sample: nothing to fork")
            require(fork.child_slot not in self.slots, f"slot {fork.child_slot} is taken")
            parent = self.slots[fork.parent_slot]
            self.slots[fork.child_slot] = Slot(
                list(parent.token_ids), parent.num_computed_tokens, list(parent.block_table), parent.params, fork.seed, 1
            )
            contexts[fork.child_slot] = contexts[fork.parent_slot]
        for index, context in contexts.items():
            sampled[index] = self._sample(self.slots[index], context)
        order = sorted(sampled)
        reasons = [sampled[index][1] for index in order]
        return StepResult(
            epoch=plan.epoch,
            step_id=plan.step_id,
            token_ids=[sampled[index][0] for index in order],
            end_reasons=reasons if any(reasons) else None,
        )

    def _apply(self, plan: StepPlan) -> None:
        for index in plan.retired_slots:
            require(index in self.slots, f"slot {index} is empty and cannot be retired")
            del self.slots[index]
        for admission in plan.admissions:
            require(0 <= admission.slot < self.max_num_seqs, f"slot {admission.slot} does not exist")
            require(admission.slot not in self.slots, f"slot {admission.slot} is taken")
            require(admission.num_computed_tokens < len(admission.token_ids), "nothing to compute")
            self.slots[admission.slot] = Slot(
                list(admission.token_ids),
                admission.num_computed_tokens,
                list(admission.block_table),
                admission.params,
                admission.params.seed,
            )
        for index, logical, physical in _tuples(plan.table_updates, 3):
            require(index in self.slots, f"table update of empty slot {index}")
            table = self.slots[index].block_table
            require(logical <= len(table), f"hole in the table of slot {index}")
            table[logical : logical + 1] = [physical]
        sources, destinations = set(plan.block_copies[::2]), set(plan.block_copies[1::2])
        require(not sources & destinations, "copies chain")
        for source, destination in _tuples(plan.block_copies, 2):
            self.kv[destination] = list(self.kv[source])
        for index, num_tokens in _tuples(plan.row_counts, 2):
            require(index in self.slots, f"row count of empty slot {index}")
            require(self.slots[index].row_count != num_tokens, f"row count of slot {index} is sent and did not change")
            self.slots[index].row_count = num_tokens
        for slot in self.slots.values():
            require(all(0 < block < self.num_blocks for block in slot.block_table), "block id outside the pool")

    def _compute(self, slot: Slot) -> None:
        end = slot.num_computed_tokens + slot.row_count
        require(end <= len(slot.token_ids), "more tokens to compute than are known")
        require(end <= len(slot.block_table) * self.block_size, "block table too short")
        for position in range(slot.num_computed_tokens, end):
            context = self._read(slot)
            block, offset = divmod(position, self.block_size)
            self.kv[slot.block_table[block]][offset] = _entry(context, slot.token_ids[position])
            slot.num_computed_tokens += 1

    def _read(self, slot: Slot) -> list[int]:
        entries: list[int] = []
        for position in range(slot.num_computed_tokens):
            block, offset = divmod(position, self.block_size)
            entry = self.kv[slot.block_table[block]][offset]
            require(entry is not None, "KV that was never written is read")
            entries.append(entry)  # type: ignore[arg-type]
        return entries

    def _sample(self, slot: Slot, context: list[int]) -> tuple[int, FinishReason | None]:
        token_id = _sample(context, slot.seed, self.vocab_size)
        slot.token_ids.append(token_id)
        reason = _end_reason(slot.params, token_id, len(slot.token_ids))
        slot.has_ended = reason is not None
        return token_id, reason


def _tuples(flat: list[int], width: int) -> list[tuple[int, ...]]:
    return [tuple(flat[i : i + width]) for i in range(0, len(flat), width)]
