"""Plans and results of steps as plain data.

executor.proto documents the meaning of each field and the order in which the parts of a plan take effect. All integer
arrays are int32 unless a docstring says otherwise.
"""

import math
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Interval:
    """The range of a parameter, from least to most. Infinities and NaN are never in it."""

    least: float
    most: float = math.inf
    includes_least: bool = True

    def __contains__(self, value: float) -> bool:
        above = self.least <= value if self.includes_least else self.least < value
        return above and value <= self.most and abs(value) < math.inf

    def __str__(self) -> str:
        opening = "[" if self.includes_least and self.least > -math.inf else "("
        return f"{opening}{self.least}, {self.most}{']' if self.most < math.inf else ')'}"


_SEEDS = Interval(0, (1 << 64) - 1)


def _empty(*shape: int) -> Ints:
    return np.empty(shape, dtype=np.int32)


def _no_tokens() -> Ints:
    return _empty(0)


_TOKEN_IDS = {"are_token_ids": True}
"""Metadata of a field of token ids. A plan with an id outside the vocabulary is rejected."""


def _within(default: float, interval: Interval) -> Any:
    """Returns a field that holds a number. A plan with a number outside the interval is rejected."""
    return field(default=default, metadata={"interval": interval})


@dataclass(frozen=True, slots=True)
class SequenceParams:
    """Parameters of a sequence: how it is sampled, what is reported of it, and when it ends.

    A parameter is declared here, with the values it may have, and sent under the same name in executor.proto. The check
    and the decoding of plans read this declaration.

    Bounds on tokens count prompt and output. bias_values[n] float32 belong to bias_token_ids[n]. num_logprobs and
    num_prompt_logprobs: 0 is none, k + 1 is the token itself and the k most probable ones. num_candidates: above 0, the
    sequence is a beam. grammar: one that the output follows, in llguidance's JSON form; empty: none.
    """

    max_total_tokens: int
    min_total_tokens: int = 0
    temperature: float = _within(0.0, Interval(0))
    top_k: int = _within(0, Interval(0))
    top_p: float = _within(1.0, Interval(0, 1, includes_least=False))
    min_p: float = _within(0.0, Interval(0, 1))
    seed: int = _within(0, _SEEDS)
    eos_token_ids: Ints = field(default_factory=_no_tokens, metadata=_TOKEN_IDS)
    stop_token_ids: Ints = field(default_factory=_no_tokens, metadata=_TOKEN_IDS)
    allowed_token_ids: Ints = field(default_factory=_no_tokens, metadata=_TOKEN_IDS)
    bias_token_ids: Ints = field(default_factory=_no_tokens, metadata=_TOKEN_IDS)
    bias_values: Floats = field(default_factory=lambda: np.empty(0, dtype=np.float32))
    repetition_penalty: float = _within(1.0, Interval(0, includes_least=False))
    frequency_penalty: float = _within(0.0, Interval(-math.inf))
    presence_penalty: float = _within(0.0, Interval(-math.inf))
    num_prompt_tokens: int = 0
    num_logprobs: int = 0
    num_prompt_logprobs: int = 0
    num_candidates: int = 0
    grammar: str = ""

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence that takes a slot.

    token_ids[num_tokens], the first num_computed_tokens of which have their KV in the pool; block_table[blocks].
    """

    slot: int
    token_ids: Ints
    num_computed_tokens: int
    block_table: Ints
    params: SequenceParams


@dataclass(frozen=True, slots=True)
class Fork:
    """`child_slot` becomes a copy of `parent_slot`, except for the seed."""

    parent_slot: int
    child_slot: int
    seed: int


@dataclass(frozen=True, slots=True)
class Publication:
    """Full blocks, and digests of what they hold: blocks[n], and n times DIGEST_BYTES bytes."""

    blocks: Ints = field(default_factory=_no_tokens)
    digests: bytes = b""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step, as the difference from the step before.

    retired_slots[n], table_updates[n, 3] (slot, logical block, physical block), block_copies[n, 2] (source,
    destination), row_counts[n, 2] (slot, tokens per step), branches[n, 3] (slot, parent slot, token),
    withdrawn_blocks[n].
    """

    epoch: int
    step_id: int
    retired_slots: Ints = field(default_factory=lambda: _empty(0))
    admissions: tuple[Admission, ...] = ()
    table_updates: Ints = field(default_factory=lambda: _empty(0, 3))
    block_copies: Ints = field(default_factory=lambda: _empty(0, 2))
    row_counts: Ints = field(default_factory=lambda: _empty(0, 2))
    forks: tuple[Fork, ...] = ()
    branches: Ints = field(default_factory=lambda: _empty(0, 3))
    published: Publication = field(default_factory=Publication)
    withdrawn_blocks: Ints = field(default_factory=lambda: _empty(0))

    @property
    def changes_tables(self) -> bool:
        """Returns whether the plan does more than to compute the next tokens of the sequences that are there."""
        arrays = (self.retired_slots, self.table_updates, self.block_copies, self.branches, self.published.blocks)
        return bool(self.admissions or self.forks or any(array.size for array in arrays))


class EndReason(IntEnum):
    """The reason for which a sequence ended, with the values of executor.proto. GOES_ON: it has not ended."""

    GOES_ON = 0
    EOS = 1
    LENGTH = 2
    STOP = 3
    NOT_FINITE = 4
    GRAMMAR = 5
    DEFERRED = 6


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Durations of the parts of a step, in nanoseconds.

    queue_ns is how long the plan waited for the device thread, and idle_ns how long the device had nothing to do before
    the step. Runners that compute a step at once leave both to the device thread.

    For launched steps, forward, sample and idle are measured by the device's clock and follow each other without a gap;
    preparing then overlaps with them.
    """

    prepare_ns: int
    forward_ns: int
    sample_ns: int
    queue_ns: int = 0
    idle_ns: int = 0
    prepare_overlaps: bool = False

    @property
    def busy_ns(self) -> int:
        """Returns how long the step kept the device busy."""
        return self.forward_ns + self.sample_ns + (0 if self.prepare_overlaps else self.prepare_ns)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of tokens, slot after slot: token_ids[n], values[n] float32, ranks[n].

    Candidates of beams have no ranks: they are ordered by probability.
    """

    token_ids: Ints
    values: Floats
    ranks: Ints | None


@dataclass(frozen=True, slots=True)
class Reports:
    """Reports that slots asked for, by ascending slot, as in executor.proto. A part is None if no slot asked for it."""

    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    candidates: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The result of a step, by ascending slot: token_ids[n] and end_reasons[n] (uint8, EndReason), and reports."""

    epoch: int
    step_id: int
    token_ids: Ints
    end_reasons: NDArray[np.uint8]
    timings: StepTimings
    reports: Reports = field(default_factory=Reports)
