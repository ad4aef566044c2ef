"""Plans, results and events: the plain data that the core exchanges with the engine, one plan and one result per step.

The fields mean what they mean in the plan stream (protos/quire/executor/v1/executor.proto), into which
`scheduler.engine.plan_wire` translates them. Lists of tuples are flat: (a, b), (c, d), … is [a, b, c, d, …].
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from scheduler.core.request import SequenceParams
from scheduler.core.sequence import FinishReason, Sequence


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence that takes a slot, with everything the executor has to know about it."""

    slot: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_table: list[int]
    params: SequenceParams


@dataclass(frozen=True, slots=True)
class Fork:
    """Tells the executor to copy `parent_slot` to `child_slot`, which samples its own token from the same logits."""

    parent_slot: int
    child_slot: int
    seed: int


@dataclass(slots=True)
class StepPlan:
    """One step of the executor, as a difference to the step before.

    The last two fields are not sent, because the executor can compute them.
    """

    epoch: int
    step_id: int
    retired_slots: list[int] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    table_updates: list[int] = field(default_factory=list)  # (slot, logical block, physical block)
    block_copies: list[int] = field(default_factory=list)  # (source block, destination block)
    row_counts: list[int] = field(default_factory=list)  # (slot, tokens per step)
    forks: list[Fork] = field(default_factory=list)
    branches: list[int] = field(default_factory=list)  # (slot, parent slot, token)
    published: dict[int, bytes] = field(default_factory=dict)  # block → digest
    withdrawn_blocks: list[int] = field(default_factory=list)
    num_sequences: int = 0
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Flat arrays of equal length. `ranks` is empty for candidates, which are sorted, most probable first."""

    token_ids: SequenceOf[int]
    values: SequenceOf[float]
    ranks: SequenceOf[int] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """Sampled tokens by ascending slot. `end_reasons` has one entry for each, or is None if no sequence ends.

    `deferred` has the places, in `token_ids`, of sequences for whose token the executor did not wait: these tokens have
    no meaning. The last three fields are None unless a request asked for them: `logprobs` has k + 1 entries for each
    sampled token (the token, then the k most probable), `prompt_logprobs` the same for each prompt token whose
    predecessor this step computed, and `candidates` the candidates of each beam.
    """

    epoch: int
    step_id: int
    token_ids: SequenceOf[int]
    end_reasons: SequenceOf[FinishReason | None] | None = None
    deferred: SequenceOf[int] = ()
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    candidates: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class BeamResult:
    """One beam that has ended: its output, the last token included, and its score with the length penalty."""

    token_ids: list[int]
    score: float
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability of a token, then those of the most probable tokens in order. Three lists of equal length."""

    token_ids: list[int]
    values: list[float]
    ranks: list[int]


@dataclass(slots=True)
class Events:
    """Changes that the engine has to report to the clients after a commit, a stop or an expiry.

    `sequences` and `token_ids` are parallel lists, with one new token for each sequence. A sequence's last token is in
    the same Events as its entry in `finished`, and is reported first. `logprobs` has an entry for each sequence that
    asked, in the order of `sequences`. `prompt_logprobs` has the position of the first prompt token, and one entry for
    each token from there on. `beams` has the results of beam searches that have ended, best first.
    """

    started: list[Sequence] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finished: list[tuple[Sequence, FinishReason]] = field(default_factory=list)
    logprobs: list[tuple[Sequence, TokenLogprobs]] = field(default_factory=list)
    prompt_logprobs: list[tuple[Sequence, int, list[TokenLogprobs]]] = field(default_factory=list)
    beams: list[tuple[Sequence, list[BeamResult]]] = field(default_factory=list)
