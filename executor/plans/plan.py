"""What goes into a step and what comes out: the plan stream as plain data.

The meaning of each field, and the order in which a plan takes effect, is documented in executor.proto. All integer
arrays are int32, unless said otherwise.
"""

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]


def _empty(*shape: int) -> Ints:
    return np.empty(shape, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class SequenceParams:
    """How a sequence is sampled, what is reported of it, and when it ends. Token bounds count prompt and output.

    bias_values[n] float32 belong to bias_token_ids[n]. num_logprobs and num_prompt_logprobs: 0 is none, k + 1 the token
    itself and the k most probable. num_candidates: above 0, the sequence is a beam.
    """

    max_total_tokens: int
    min_total_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    eos_token_ids: Ints = field(default_factory=lambda: _empty(0))
    stop_token_ids: Ints = field(default_factory=lambda: _empty(0))
    allowed_token_ids: Ints = field(default_factory=lambda: _empty(0))
    bias_token_ids: Ints = field(default_factory=lambda: _empty(0))
    bias_values: Floats = field(default_factory=lambda: np.empty(0, dtype=np.float32))
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    num_prompt_tokens: int = 0
    num_logprobs: int = 0
    num_prompt_logprobs: int = 0
    num_candidates: int = 0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0


@dataclass(frozen=True, slots=True)
class Admission:
    """token_ids[num_tokens], of which the first num_computed_tokens have their KV in the pool; block_table[blocks]."""

    slot: int
    token_ids: Ints
    num_computed_tokens: int
    block_table: Ints
    params: SequenceParams


@dataclass(frozen=True, slots=True)
class Fork:
    """`child_slot` becomes a copy of `parent_slot`, but for the seed."""

    parent_slot: int
    child_slot: int
    seed: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step, as a difference to the step before.

    retired_slots[n], table_updates[n, 3] (slot, logical block, physical block), block_copies[n, 2] (source,
    destination), row_counts[n, 2] (slot, tokens a step), branches[n, 3] (slot, parent slot, token).
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


class EndReason(IntEnum):
    """Why a sequence ended; values as on the wire. GOES_ON is no end."""

    GOES_ON = 0
    EOS = 1
    LENGTH = 2
    STOP = 3


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Nanoseconds: the plan waiting for the device thread, preparing the batch, the model, sampling; and how long the
    device thread had nothing to do before. The runner leaves the first and the last to the device thread.

    Where steps are launched, forward, sample and idle are on the device's clock and follow on one another without a
    gap; preparing then overlaps with them.
    """

    prepare_ns: int
    forward_ns: int
    sample_ns: int
    queue_ns: int = 0
    idle_ns: int = 0
    prepare_overlaps: bool = False

    @property
    def busy_ns(self) -> int:
        """What the step took of the time that is not idle."""
        return self.forward_ns + self.sample_ns + (0 if self.prepare_overlaps else self.prepare_ns)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of some tokens, slot after slot: token_ids[n], values[n] float32, ranks[n]; no ranks where they are in order."""

    token_ids: Ints
    values: Floats
    ranks: Ints | None


@dataclass(frozen=True, slots=True)
class Reports:
    """What slots asked for, by ascending slot; None if no slot did. As in executor.proto."""

    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    candidates: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """token_ids[n] and end_reasons[n] (uint8, EndReason) of the slots that sampled, by ascending slot."""

    epoch: int
    step_id: int
    token_ids: Ints
    end_reasons: NDArray[np.uint8]
    timings: StepTimings
    reports: Reports = field(default_factory=Reports)
