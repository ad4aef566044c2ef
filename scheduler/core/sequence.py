"""A sequence, the unit of scheduling. A request has one, or one for each of its samples."""

from copy import copy
from dataclasses import replace
from enum import Enum
from math import inf

from scheduler.core.errors import InvariantViolation
from scheduler.core.request import ReceivedOutput, Request, SequenceParams
from scheduler.core.tenants.account import NO_ACCOUNT, Account


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(Enum):
    EOS = "eos"
    LENGTH = "length"
    STOP = "stop"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    TOO_LATE = "too_late"
    ERROR = "error"
    CAPACITY = "capacity"
    MODEL_CHANGED = "model_changed"
    NOT_FINITE = "not_finite"
    GRAMMAR = "grammar"
    EXECUTORS_LOST = "executors_lost"


MIN_PROGRESS = 2
"""Tokens that are progress between two losses of executors: the computation of the known ones alone yields one."""

TRANSITIONS: dict[State, dict[State, str]] = {
    State.WAITING: {
        State.RUNNING: "admitted: has a slot and the blocks of its first chunk",
        State.FINISHED: "cancelled, its deadline passed or is too near, a smaller pool came, or executors kept dying",
    },
    State.RUNNING: {
        State.PREEMPTED: "gave its blocks to another sequence; its tokens stay",
        State.WAITING: "the executor was lost; its tokens stay",
        State.FINISHED: "ended by EOS, length, stop, cancel or deadline",
    },
    State.PREEMPTED: {
        State.RUNNING: "admitted again; its tokens are recomputed",
        State.FINISHED: "cancelled, its deadline passed, or a smaller pool came",
    },
    State.FINISHED: {},
}
"""Every legal change of state, and when it happens. A forked sequence starts as RUNNING, all others as WAITING."""


class Sequence:
    """The tokens of a sequence, and how much of their KV is planned and computed.

        token_ids      ├──────────── prompt ────────────┼── output ──┤
        computed       [0, num_computed_tokens)                            KV is in the pool: results committed
        planned        [0, num_planned_tokens)                             … once the plans in flight are done
        writable       [num_planned_tokens, write_limit)                   in unshared blocks: needs no allocation

    A sequence has no phases, only planned tokens and tokens still to be planned. If a single token is left, which was
    just sampled or is being sampled, the sequence is *decoding*. Its num_planned_tokens is then ahead of token_ids by
    the tokens in flight.
    """

    __slots__ = (
        "account",
        "arrival",
        "block_table",
        "digests",
        "displaced_by",
        "group_leader",
        "index",
        "is_charged",
        "is_guaranteed",
        "is_set_aside",
        "loss_mark",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_deferrals",
        "num_given_tokens",
        "num_losses",
        "num_planned_tokens",
        "num_preemptions",
        "num_prompt_reported",
        "num_prompt_tokens",
        "num_reserved_blocks",
        "params",
        "publish_at",
        "queued_s",
        "request",
        "resume_s",
        "row_count",
        "slot",
        "state",
        "token_ids",
        "write_limit",
    )

    def __init__(self, request: Request, index: int, arrival: int, account: Account = NO_ACCOUNT) -> None:
        self.account = account
        self.request = request
        self.index = index
        self.arrival = arrival
        self.params = _params_of(request, index)
        # Length of the prompt prefix whose log-probabilities were reported.
        self.num_prompt_reported = request.num_prompt_reported
        self.group_leader: Sequence | None = None  # of a beam
        received = request.outputs[index] if request.outputs else ReceivedOutput()
        self.token_ids = [*request.prompt_token_ids, *received.token_ids]
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_given_tokens = len(self.token_ids)  # prompt and received output, which is computed like a prompt
        self.state = State.FINISHED if received.is_finished else State.WAITING
        self.num_cached_tokens: int | None = None  # of the given tokens; set if its request started with this sequence
        self.queued_s = -inf  # when it last entered the queue
        self.is_set_aside = False  # the queue passes over it until the next plan
        self.num_deferrals = 0  # times in a row that the executor did not wait for its next token
        self.resume_s = -inf  # when the pause of a deferred sequence ends
        self.num_preemptions = 0
        self.is_charged = False  # the service of its given tokens; a successor has its own
        self.displaced_by: Account | None = None  # the tenant whose claim preempted it; it pays for the recomputation
        self.num_losses = 0  # executors lost in a row without progress in between
        self.loss_mark = 0  # tokens at the last loss, those of a beam included
        self.digests: list[bytes] = []  # hash chain of the full blocks, computed as far as it was needed
        self.forget_kv()

    def forget_kv(self) -> None:
        """Resets the sequence to nothing computed. The caller has released its slot and blocks."""
        self.slot = -1
        self.row_count = 0  # tokens per step, as last sent to the executor
        self.block_table: list[int] = []
        self.num_computed_tokens = 0
        self.num_planned_tokens = 0
        self.write_limit = 0
        self.publish_at = 0  # num_computed_tokens at which the next block is full; set by the KV cache
        self.num_reserved_blocks = 0
        self.is_guaranteed = False  # admitted with all its blocks reserved, so never preempted
        if self.num_prompt_reported == self.num_prompt_tokens - 1:
            self.params = replace(self.params, num_prompt_logprobs=0)  # all were reported: they are not requested again

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Number of known tokens that no plan computes yet (0 if the sequence's next token is in flight)."""
        return max(0, len(self.token_ids) - self.num_planned_tokens)

    @property
    def leader(self) -> "Sequence":
        """Itself. For a beam, the sequence that waits, ends and holds reservations for its group."""
        return self if self.group_leader is None else self.group_leader

    @property
    def is_finished(self) -> bool:
        return self.state is State.FINISHED

    @property
    def is_suspect(self) -> bool:
        """True if two executors in a row were lost while the sequence ran, and it has made no progress since."""
        return self.num_losses >= 2 and len(self.token_ids) < self.loss_mark + MIN_PROGRESS

    @property
    def is_beam(self) -> bool:
        return self.params.num_candidates > 0

    def become(self, state: State) -> None:
        if state not in TRANSITIONS[self.state]:
            raise InvariantViolation(f"{self!r} cannot become {state.value}")
        self.state = state

    def count_loss(self, num_tokens: int) -> None:
        """Called when the executor was lost while this sequence or its beams had `num_tokens` tokens each.

        A beam search begins again with its prompt, so it makes progress if it gets further than before.
        """
        self.num_losses = self.num_losses + 1 if num_tokens < self.loss_mark + MIN_PROGRESS else 1
        self.loss_mark = num_tokens

    def successor(self) -> "Sequence":
        """Returns a waiting sequence that goes on from the tokens of this one, which ends."""
        successor = copy(self)
        successor.token_ids, successor.digests = self.token_ids.copy(), self.digests.copy()
        successor.num_deferrals = self.num_deferrals + 1 if len(self.token_ids) == self.num_given_tokens else 1
        successor.num_given_tokens = len(self.token_ids)
        successor.is_charged = False
        successor.state = State.WAITING
        successor.forget_kv()
        return successor

    def __repr__(self) -> str:
        return f"<sequence {self.request.request_id}.{self.index} {self.state.value}>"


def _params_of(request: Request, index: int) -> SequenceParams:
    """Returns the parameters of one sample. Samples have different seeds, and only the first reports on the prompt."""
    params = request.params
    if request.beam is not None:
        num_ends = len({*params.eos_token_ids, *params.stop_token_ids})
        return replace(params, seed=request.seeds[0], num_candidates=request.beam.num_candidates(num_ends))
    return replace(params, seed=request.seeds[index], num_prompt_logprobs=0 if index else params.num_prompt_logprobs)
