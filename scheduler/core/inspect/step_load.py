"""The load of a step in a few numbers, from which its cost can be predicted for any batch.

A plan holds only what changed since the one before it. `LoadTracker` follows the stream of plans, so it knows each
slot's context, like the executor. It keeps sums, so a plan takes time proportional to its changes, not to the number of
decoding sequences.
"""

from dataclasses import dataclass
from typing import NamedTuple

from scheduler.core.plan import Admission, StepPlan


class StepLoad(NamedTuple):
    """The load of one step.

    A *pair* is a token that is computed and a token that it attends to, itself included. The bytes that attention reads
    for decodes, and its multiplications for prefills, are proportional to pairs.

    num_decodes         sequences that compute the one token they sampled last
    num_decode_pairs    sum of their contexts
    num_prefills        sequences that compute known tokens
    num_prefill_tokens  tokens that they compute
    num_prefill_pairs   sum of the tokens that each of these tokens attends to
    num_sampled         tokens that are sampled; beams sample none
    num_reported        prompt tokens of requests for their log-probabilities
    """

    num_decodes: int
    num_decode_pairs: int
    num_prefills: int = 0
    num_prefill_tokens: int = 0
    num_prefill_pairs: int = 0
    num_sampled: int = 0
    num_reported: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.num_prefill_tokens


@dataclass(slots=True)
class _Slot:
    """A slot whose sequence does not decode: it computes known tokens, is a beam, or pauses."""

    num_computed_tokens: int
    num_known_tokens: int
    num_row_tokens: int
    is_beam: bool
    is_reported: bool = False


class LoadTracker:
    """Follows the plans of one epoch."""

    def __init__(self) -> None:
        self.num_decodes = 0  # in the next plan, if it changes nothing
        self.num_decode_context = 0  # sum of their computed tokens
        self._num_steps = 0
        self._decodes: dict[int, int] = {}  # slot → computed tokens minus steps so far, which stays constant
        self._others: dict[int, _Slot] = {}

    def follow(self, plan: StepPlan) -> StepLoad:
        """Returns the load of the next plan of the stream."""
        for slot in plan.retired_slots:
            self._leave(slot)
        for admission in plan.admissions:
            self._admit(admission)
        counts = plan.row_counts
        num_beams = num_beam_pairs = 0
        for i in range(0, len(counts), 2):
            if (num_again := self._set_row_count(counts[i], counts[i + 1])) > 0:
                num_beams, num_beam_pairs = num_beams + 1, num_beam_pairs + num_again
        if plan.branches:
            contexts = self._branch(plan.branches)
            num_beams, num_beam_pairs = num_beams + len(contexts), num_beam_pairs + sum(contexts)
        num_decodes = self.num_decodes
        self.skip(1)
        num_decode_pairs = self.num_decode_context
        prefills = self._prefill() if self._others else (0, 0, 0, 0, 0)
        for fork in plan.forks:
            self._join(fork.child_slot, self._context(fork.parent_slot))
        return StepLoad(
            num_decodes + num_beams,
            num_decode_pairs + num_beam_pairs,
            *prefills[:3],
            num_decodes + prefills[3] + len(plan.forks),
            prefills[4],
        )

    @property
    def num_slots(self) -> int:
        """Number of slots that are taken according to the plans so far."""
        return len(self._decodes) + len(self._others)

    def skip(self, num_steps: int) -> None:
        """Follows `num_steps` plans that change nothing, in which each decoding sequence computes one token."""
        self._num_steps += num_steps
        self.num_decode_context += num_steps * self.num_decodes

    def _prefill(self) -> tuple[int, int, int, int, int]:
        """Returns the numbers of sequences, tokens, pairs, sequences that sample because no known token is left, and
        tokens that are reported."""
        num_prefills = num_tokens = num_pairs = num_sampled = num_reported = 0
        for number, slot in list(self._others.items()):
            num_row_tokens = slot.num_row_tokens
            if not num_row_tokens or slot.num_computed_tokens >= slot.num_known_tokens:
                continue
            num_prefills += 1
            num_tokens += num_row_tokens
            num_reported += num_row_tokens * slot.is_reported
            num_pairs += num_row_tokens * slot.num_computed_tokens + num_row_tokens * (num_row_tokens + 1) // 2
            slot.num_computed_tokens += num_row_tokens
            if slot.num_computed_tokens >= slot.num_known_tokens and not slot.is_beam:
                num_sampled += 1
                if num_row_tokens == 1:  # it decodes from now on, and no plan will say so
                    self._join(number, self._leave(number))
        return num_prefills, num_tokens, num_pairs, num_sampled, num_reported

    def _admit(self, admission: Admission) -> None:
        params = admission.params
        self._others[admission.slot] = _Slot(
            admission.num_computed_tokens,
            len(admission.token_ids),
            0,
            is_beam=params.num_candidates > 0,
            is_reported=params.num_prompt_logprobs > 0,
        )

    def _set_row_count(self, number: int, num_tokens: int) -> int:
        """Returns the context of a beam that computes its last token again, because it was late; else 0."""
        slot = self._others.get(number)
        if slot is None:
            if num_tokens or number not in self._decodes:
                raise LookupError(f"slot {number} decodes, and was given {num_tokens} tokens a step")
            num_computed = self._leave(number)
            self._others[number] = _Slot(num_computed, num_computed, 0, is_beam=False)
        elif slot.num_computed_tokens < slot.num_known_tokens:
            slot.num_row_tokens = num_tokens
        elif slot.is_beam:
            return slot.num_computed_tokens
        elif num_tokens == 1:
            self._join(number, self._leave(number))
        return 0

    def _branch(self, branches: list[int]) -> list[int]:
        """Continues the contexts of parents by one token each, and returns the contexts of the beams."""
        placed = [(branches[i], self._context(branches[i + 1]) + 1) for i in range(0, len(branches), 3)]
        for number, num_computed in placed:
            self._leave(number)
            self._others[number] = _Slot(num_computed, num_computed, 0, is_beam=True)
        return [num_computed for _, num_computed in placed]

    def _context(self, number: int) -> int:
        if number in self._decodes:
            return self._decodes[number] + self._num_steps
        return self._others[number].num_computed_tokens

    def _join(self, number: int, num_computed: int) -> None:
        self._decodes[number] = num_computed - self._num_steps
        self.num_decodes += 1
        self.num_decode_context += num_computed

    def _leave(self, number: int) -> int:
        """Empties a slot and returns its computed tokens. A slot that was never filled is no error."""
        if number in self._decodes:
            num_computed = self._decodes.pop(number) + self._num_steps
            self.num_decodes -= 1
            self.num_decode_context -= num_computed
            return num_computed
        slot = self._others.pop(number, None)
        return slot.num_computed_tokens if slot else 0
