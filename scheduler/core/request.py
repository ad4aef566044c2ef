"""Requests as the engine passes them to the core: validated, with all defaults resolved."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from scheduler.core.tenants.account import DEFAULT_TENANT


@dataclass(frozen=True, slots=True)
class SequenceParams:
    """Parameters that control how one sequence is sampled and when it ends.

    The core reads the token bounds and the numbers of log-probabilities, and passes the rest on. `max_total_tokens` and
    `min_total_tokens` count prompt and output together. `num_logprobs` and `num_prompt_logprobs` are 0 for none, and
    k + 1 for the token and the k most probable ones. The core sets `num_candidates`: the number of next tokens that a
    beam reports. `grammar` is in a form that the executor reads; empty: none.
    """

    max_total_tokens: int
    min_total_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bias_token_ids: tuple[int, ...] = ()
    bias_values: tuple[float, ...] = ()
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    num_logprobs: int = 0
    num_prompt_logprobs: int = 0
    num_candidates: int = 0
    grammar: str = ""


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Parameters of a beam search, which replaces sampling.

    width           beams that run at the same time
    num_returned    how many of the best beams are returned; at most width
    length_penalty  a score is the sum of log-probabilities divided by num_tokens ** length_penalty: values above 0
                    favour long outputs
    early_stopping  whether the search ends as soon as `width` beams have ended; if not, it continues until no running
                    beam can become better than those
    """

    width: int
    num_returned: int
    length_penalty: float = 1.0
    early_stopping: bool = False

    def num_candidates(self, num_ends: int) -> int:
        """Returns the candidates per beam that suffice to keep `width` beams, if `num_ends` token ids end one."""
        return max(2, 1 + num_ends) * self.width


@dataclass(frozen=True, slots=True)
class ReceivedOutput:
    """The output that the client of a resumed request has already received of one sequence.

    A sequence that is not finished has fewer tokens than `max_total_tokens` allows, and none of them ends it.
    """

    token_ids: SequenceOf[int] = ()
    is_finished: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """A client's request.

    request_id       unique among all requests of the core; assigned by the engine, never the client's own id
    prompt_token_ids at least one
    params           parameters of sequence 0; the other sequences differ only in their seeds
    seeds            one for each sequence; their number is the request's `n`
    beam             parameters of a beam search, which has seeds (0,) and greedy params; None: no beam search
    tenant           the tenant that is charged, and that shares prefixes with no other
    is_open_ended    the client set no max_tokens: params.max_total_tokens is what fits, and shrinks with the pool
    outputs          for a request that is resumed with some output: one for each sequence, not all finished; otherwise
                     empty. A beam search has none, because it starts again
    is_resumed       its client has received the beginning of the stream, if only its prompt's log-probabilities
    num_prompt_reported  log-probabilities of prompt tokens that the client of a resumed request has received
    priority         under the priority policy, lower runs earlier; it orders the requests of one tenant only
    cache_salt       only requests with the same salt share prefixes
    deadline_s       on the clock whose readings are passed to `Scheduler.expire`; None: no deadline
    """

    request_id: int
    prompt_token_ids: SequenceOf[int]
    params: SequenceParams
    seeds: tuple[int, ...] = (0,)
    priority: int = 0
    cache_salt: bytes = b""
    deadline_s: float | None = None
    beam: BeamParams | None = None
    is_open_ended: bool = False
    tenant: str = DEFAULT_TENANT
    outputs: tuple[ReceivedOutput, ...] = ()
    is_resumed: bool = False
    num_prompt_reported: int = 0

    @property
    def num_sequences(self) -> int:
        return len(self.seeds)

    @property
    def num_results(self) -> int:
        """The number of outputs that its client receives."""
        return self.beam.num_returned if self.beam else self.num_sequences

    @property
    def num_slots(self) -> int:
        """The most slots that the request holds at once: one for each sample, or for each beam."""
        return self.beam.width if self.beam else self.num_sequences

    @property
    def max_tokens(self) -> int:
        """The most tokens that one sequence has still to generate: a resumed one lacks those after its output."""
        num_received = min((len(output.token_ids) for output in self.outputs if not output.is_finished), default=0)
        return self.params.max_total_tokens - len(self.prompt_token_ids) - num_received

    @property
    def num_given_tokens(self) -> int:
        """Number of tokens to compute at its arrival: the prompt, or prompt and output of each unfinished sequence."""
        num_prompt_tokens = len(self.prompt_token_ids)
        if not self.outputs:
            return num_prompt_tokens
        return sum(num_prompt_tokens + len(output.token_ids) for output in self.outputs if not output.is_finished)
