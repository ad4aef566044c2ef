"""An executor in plain Python, without weights, that enforces the contract of the plan stream exactly.

Its "KV" makes mistakes visible. The entry of a token is a hash of the token and of *every entry before it, read
through the block table*; the sampled token is a hash of all entries and the seed. So a stale, missing or overwritten
block anywhere changes the output. `expected_output` returns the right output.
"""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import inf
from zlib import crc32

from scheduler.core import BeamResult, FinishReason, Fork, Logprobs, Request, SequenceParams, StepPlan, StepResult
from scheduler.core.beams.search import BeamSearch, Candidates

Sample = tuple[int, FinishReason | None]

DEFERRED: Sample = (0, None)
"""The sample of a slot for whose token the executor does not wait. It is told from others by identity."""


def kv_entry(entries: list[int], token_id: int) -> int:
    """Returns the KV entry of a token that follows these entries."""
    return crc32(array("Q", (*entries, token_id)))


def sample_token(entries: list[int], seed: int, vocab_size: int) -> int:
    return crc32(array("Q", (seed, *entries))) % vocab_size


def end_reason(params: SequenceParams, token_id: int, num_tokens: int) -> FinishReason | None:
    """Returns the reason why a sequence of `num_tokens` tokens ends with this one, or None if it continues."""
    if num_tokens >= params.min_total_tokens:
        if token_id in params.eos_token_ids:
            return FinishReason.EOS
        if token_id in params.stop_token_ids:
            return FinishReason.STOP
    return FinishReason.LENGTH if num_tokens >= params.max_total_tokens else None


def expected_output(
    prompt: list[int], params: SequenceParams, seed: int, vocab_size: int
) -> tuple[list[int], FinishReason]:
    """Returns the output that a sequence must generate in every schedule, and the reason for its end."""
    entries: list[int] = []
    for token_id in prompt:
        entries.append(kv_entry(entries, token_id))
    output: list[int] = []
    while True:
        token_id = sample_token(entries, seed, vocab_size)
        output.append(token_id)
        reason = end_reason(params, token_id, len(prompt) + len(output))
        if reason:
            return output, reason
        entries.append(kv_entry(entries, token_id))


def rank_tokens(entries: list[int], number: int, vocab_size: int) -> Candidates:
    """Returns the most probable next tokens; beyond the vocabulary there are only impossible ones."""
    values = [-(crc32(array("Q", (token_id, *entries))) % 64) / 16 for token_id in range(vocab_size)]
    order = sorted(range(vocab_size), key=lambda token_id: -values[token_id])[:number]
    num_missing = number - len(order)
    return order + [0] * num_missing, [values[token_id] for token_id in order] + [-inf] * num_missing


def token_logprobs(entries: list[int], token_id: int, width: int, vocab_size: int) -> list[tuple[int, float, int]]:
    """Returns (token, log-probability, rank) of this token and the width - 1 most probable ones."""
    order, values = rank_tokens(entries, max(vocab_size, width), vocab_size)
    ranked = list(zip(order, values, range(1, len(order) + 1), strict=True))
    return [next(entry for entry in ranked if entry[0] == token_id), *ranked[: width - 1]]


def context_of(text: list[int]) -> list[int]:
    entries: list[int] = []
    for token_id in text:
        entries.append(kv_entry(entries, token_id))
    return entries


def expected_beams(request: Request, vocab_size: int) -> list[BeamResult]:
    """Returns the beams that a search must find in every schedule."""
    assert request.beam is not None
    params, prompt = request.params, list(request.prompt_token_ids)
    reasons = dict.fromkeys(params.stop_token_ids, FinishReason.STOP)
    reasons |= dict.fromkeys(params.eos_token_ids, FinishReason.EOS)
    search = BeamSearch(request.beam, reasons, params.max_total_tokens - len(prompt))
    number = request.beam.num_candidates(len(reasons))
    texts = [prompt]
    while texts:
        survivors = search.decide([rank_tokens(context_of(text), number, vocab_size) for text in texts])
        texts = [[*texts[survivor.parent], survivor.token_id] for survivor in survivors]
    return search.results()


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
    num_prompt_tokens: int = 0
    num_admitted_tokens: int = 0  # known when it was admitted; it decodes those after them
    row_count: int = 0
    has_ended: bool = False
    is_undecided: bool = False  # a beam that has reported its candidates
    is_late: bool = False  # a beam that was to report them in its last row


@dataclass
class FakeExecutor:
    """One epoch of an executor. It starts with an empty pool and empty slots, and is discarded when it is lost.

    With `retains` it keeps the digests of published blocks, and `next_epoch` returns what a scheduler finds that comes
    back to it.

    `num_to_defer` is the number of samples to come for which it does not wait. `num_overruns` counts rows of sequences
    that had ended. The fields below it describe the last plan: its number of rows, its number of tokens, the blocks
    that it read, wrote or copied (rows of ended sequences included), and the slots that sampled.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int
    epoch: int
    retains: bool = False
    digests: dict[int, bytes] = field(default_factory=dict)
    step_id: int = 0
    num_to_defer: int = 0
    slots: dict[int, Slot] = field(default_factory=dict)
    num_overruns: int = 0
    num_sequences: int = 0
    num_tokens: int = 0
    touched_blocks: frozenset[int] = frozenset()
    sampled_slots: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.kv: list[list[int | None]] = [[None] * self.block_size for _ in range(self.num_blocks)]
        self._before: list[tuple[list[list[int | None]], dict[int, bytes]]] = []  # before each plan

    def next_epoch(self, epoch: int, num_unexecuted: int = 0) -> "FakeExecutor":
        """Returns the next epoch of the same executor, which never executed the last `num_unexecuted` plans.

        Blocks that are not retained are as good as unwritten: no plan of the next epoch may read them.
        """
        kv, digests = self.kv, self.digests
        if num_unexecuted and self.retains:
            kv, digests = self._before[-num_unexecuted]
        found = replace(self, epoch=epoch, digests=dict(digests), step_id=0, slots={}, sampled_slots=frozenset())
        for block in digests:
            found.kv[block] = list(kv[block])
        return found

    def execute(self, plan: StepPlan) -> StepResult:
        """Executes a plan and returns its result. Raises PlanError if the plan breaks a rule."""
        require(plan.epoch == self.epoch, f"epoch {plan.epoch}, not {self.epoch}")
        require(plan.step_id == self.step_id + 1, f"step {plan.step_id} after {self.step_id}")
        self.step_id = plan.step_id
        if self.retains:
            self._before.append(([list(block) for block in self.kv], dict(self.digests)))
        self._retain(plan)
        self._prompt_logprobs: dict[int, list[tuple[int, float, int]]] = {}
        self._apply_deltas(plan)
        overrun = {index for index, slot in self.slots.items() if slot.row_count and slot.has_ended}
        contexts = self._compute_rows(overrun, is_news=bool(plan.published or plan.withdrawn_blocks))
        self._fork(plan.forks, contexts)
        self.touched_blocks = frozenset(self._blocks_in_use()) | set(plan.block_copies)
        sampled: dict[int, Sample] = dict.fromkeys(overrun, (0, None))
        logprobs = {index: [(0, 0.0, 1)] * self.slots[index].params.num_logprobs for index in overrun}
        candidates: dict[int, Candidates] = {}
        for index, context in contexts.items():
            slot = self.slots[index]
            if slot.params.num_candidates:
                candidates[index] = self._report(slot, context)
                continue
            sampled[index] = self._sample(slot, context)
            if sampled[index] is DEFERRED:
                logprobs[index] = [(0, 0.0, 1)] * slot.params.num_logprobs
            elif slot.params.num_logprobs:
                logprobs[index] = token_logprobs(context, sampled[index][0], slot.params.num_logprobs, self.vocab_size)
        self.sampled_slots = frozenset(sampled)
        self.num_overruns += len(overrun)
        return replace(
            _pack(plan, sampled),
            logprobs=_pack_logprobs(logprobs),
            prompt_logprobs=_pack_logprobs(self._prompt_logprobs),
            candidates=_pack_candidates(candidates),
        )

    def _retain(self, plan: StepPlan) -> None:
        require(self.retains or not (plan.published or plan.withdrawn_blocks), "this executor retains no blocks")
        for block in plan.withdrawn_blocks:
            require(0 < block < self.num_blocks, f"block {block} outside the pool is withdrawn")
            self.digests.pop(block, None)
        for block, digest in plan.published.items():
            require(0 < block < self.num_blocks, f"block {block} outside the pool is published")
            require(block not in self.digests, f"block {block} is published, and has a digest already")
            require(None not in self.kv[block], f"I5: block {block} is published, its KV is not computed")
            self.digests[block] = digest

    def _apply_deltas(self, plan: StepPlan) -> None:
        for index in plan.retired_slots:
            require(index in self.slots, f"slot {index} is empty and cannot be retired")
            del self.slots[index]
        for admission in plan.admissions:
            self._require_free_slot(admission.slot)
            require(0 <= admission.num_computed_tokens < len(admission.token_ids), "nothing to compute")
            self.slots[admission.slot] = Slot(
                list(admission.token_ids),
                admission.num_computed_tokens,
                list(admission.block_table),
                admission.params,
                admission.params.seed,
                admission.num_prompt_tokens,
                len(admission.token_ids),
            )
        self._branch(plan.branches)
        for index, logical, physical in _tuples(plan.table_updates, 3):
            require(index in self.slots, f"table update of empty slot {index}")
            table = self.slots[index].block_table
            self.digests.pop(physical, None)
            require(0 <= logical <= len(table), f"hole in the table of slot {index}")
            table[logical : logical + 1] = [physical]
        self._copy_blocks(plan.block_copies)
        for index, num_tokens in _tuples(plan.row_counts, 2):
            require(index in self.slots, f"row count of empty slot {index}")
            require(num_tokens >= 0, f"row count {num_tokens}")
            require(not self.slots[index].is_undecided, f"row count of slot {index}, a beam that is not decided")
            require(self.slots[index].row_count != num_tokens, f"row count of slot {index} is sent and did not change")
            self.slots[index].row_count = num_tokens
        for slot in self.slots.values():
            require(all(0 < block < self.num_blocks for block in slot.block_table), "block id outside the pool")

    def _branch(self, branches: list[int]) -> None:
        """Applies all branches at once: each copies its parent as it was before the first branch."""
        targets = branches[::3]
        require(len(set(targets)) == len(targets), "two branches into one slot")
        before = dict(self.slots)
        for index, parent_index, token_id in _tuples(branches, 3):
            require(0 <= index < self.max_num_seqs, f"slot {index} does not exist")
            require(parent_index in before, f"slot {parent_index} is empty and has no branches")
            parent = before[parent_index]
            require(parent.is_undecided, f"slot {parent_index} has not reported candidates: nothing to branch from")
            require(index not in before or before[index].is_undecided, f"a branch into slot {index}, which is busy")
            self.slots[index] = replace(
                parent,
                token_ids=[*parent.token_ids, token_id],
                block_table=list(parent.block_table),
                row_count=1,
                is_undecided=False,
            )

    def _copy_blocks(self, block_copies: list[int]) -> None:
        sources, destinations = set(block_copies[::2]), set(block_copies[1::2])
        require(not sources & destinations, "copies chain")
        require(2 * len(destinations) == len(block_copies), "two copies into one block")
        for source, destination in _tuples(block_copies, 2):
            self.kv[destination] = list(self.kv[source])
            self.digests.pop(destination, None)

    def _compute_rows(self, overrun: set[int], *, is_news: bool) -> dict[int, list[int]]:
        """Computes all rows of the step; returns the entries that each sampling slot attends to.

        The contract promises no order among the rows of a step: odd steps run them by slot, even ones backwards.
        """
        row_counts = [slot.row_count for slot in self.slots.values() if slot.row_count]
        self.num_sequences, self.num_tokens = len(row_counts), sum(row_counts)
        require(self.num_tokens > 0 or is_news, "a plan without rows")
        require(self.num_tokens <= self.max_num_batched_tokens, "over the budget")
        contexts: dict[int, list[int]] = {}
        for index, slot in sorted(self.slots.items(), reverse=self.step_id % 2 == 0):
            if slot.row_count and index not in overrun:
                self._compute(index, slot)
                if slot.num_computed_tokens == len(slot.token_ids):
                    contexts[index] = self._read(slot)
        return contexts

    def _fork(self, forks: Iterable[Fork], contexts: dict[int, list[int]]) -> None:
        for fork in forks:
            require(fork.parent_slot in contexts, f"slot {fork.parent_slot} does not sample: nothing to fork")
            self._require_free_slot(fork.child_slot)
            parent = self.slots[fork.parent_slot]
            self.slots[fork.child_slot] = Slot(
                list(parent.token_ids),
                parent.num_computed_tokens,
                list(parent.block_table),
                parent.params,
                fork.seed,
                parent.num_prompt_tokens,
                parent.num_admitted_tokens,
                1,
            )
            contexts[fork.child_slot] = contexts[fork.parent_slot]

    def _require_free_slot(self, index: int) -> None:
        require(0 <= index < self.max_num_seqs, f"slot {index} does not exist")
        require(index not in self.slots, f"slot {index} is taken")

    def _blocks_in_use(self) -> Iterator[int]:
        return (block for slot in self.slots.values() if slot.row_count for block in slot.block_table)

    def _compute(self, index: int, slot: Slot) -> None:
        end = slot.num_computed_tokens + slot.row_count
        require(end <= len(slot.token_ids), "more tokens to compute than are known")
        require(end <= len(slot.block_table) * self.block_size, "block table too short")
        for position in range(slot.num_computed_tokens, end):
            context = self._read(slot)
            block, offset = divmod(position, self.block_size)
            self.digests.pop(slot.block_table[block], None)
            self.kv[slot.block_table[block]][offset] = kv_entry(context, slot.token_ids[position])
            slot.num_computed_tokens += 1
            if slot.params.num_prompt_logprobs and position + 1 < slot.num_prompt_tokens:
                report = self._prompt_logprobs.setdefault(index, [])
                next_id, width = slot.token_ids[position + 1], slot.params.num_prompt_logprobs
                report += token_logprobs(self._read(slot), next_id, width, self.vocab_size)

    def _read(self, slot: Slot) -> list[int]:
        entries: list[int] = []
        for position in range(slot.num_computed_tokens):
            block, offset = divmod(position, self.block_size)
            entry = self.kv[slot.block_table[block]][offset]
            if entry is None:
                raise PlanError("KV that was never written is read")
            entries.append(entry)
        return entries

    def _report(self, slot: Slot, context: list[int]) -> Candidates:
        slot.row_count, number, slot.is_late = 0, slot.params.num_candidates, self.num_to_defer > 0
        if slot.is_late:
            self.num_to_defer -= 1
            slot.num_computed_tokens -= 1
            return [0] * number, [inf] * number
        slot.is_undecided = True
        return rank_tokens(context, number, self.vocab_size)

    def _sample(self, slot: Slot, context: list[int]) -> Sample:
        if self.num_to_defer:
            self.num_to_defer -= 1
            slot.has_ended = True
            return DEFERRED
        token_id = sample_token(context, slot.seed, self.vocab_size)
        slot.token_ids.append(token_id)
        reason = end_reason(slot.params, token_id, len(slot.token_ids))
        slot.has_ended = reason is not None
        return token_id, reason


def _pack(plan: StepPlan, sampled: dict[int, Sample]) -> StepResult:
    """Returns a result with the tokens by ascending slot."""
    order = sorted(sampled)
    reasons = [sampled[index][1] for index in order]
    return StepResult(
        epoch=plan.epoch,
        step_id=plan.step_id,
        token_ids=[sampled[index][0] for index in order],
        end_reasons=reasons if any(reasons) else None,
        deferred=[place for place, index in enumerate(order) if sampled[index] is DEFERRED],
    )


def _pack_logprobs(by_slot: dict[int, list[tuple[int, float, int]]]) -> Logprobs | None:
    entries = [entry for index in sorted(by_slot) for entry in by_slot[index]]
    ids, values, ranks = zip(*entries, strict=True) if entries else ((), (), ())
    return Logprobs(ids, values, ranks) if entries else None


def _pack_candidates(by_slot: dict[int, Candidates]) -> Logprobs | None:
    order = sorted(by_slot)
    ids = [token_id for index in order for token_id in by_slot[index][0]]
    return Logprobs(ids, [value for index in order for value in by_slot[index][1]]) if order else None


def _tuples(flat: list[int], width: int) -> list[tuple[int, ...]]:
    return [tuple(flat[i : i + width]) for i in range(0, len(flat), width)]
