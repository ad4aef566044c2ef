"""What the core is asked to do: requests, as the shell has validated and resolved them."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SequenceParams:
    """How one sequence is sampled and when it ends. The core reads the two token bounds and what is to be reported; the
    rest it passes on.

    `max_total_tokens` and `min_total_tokens` count prompt and output together. `num_logprobs` and
    `num_prompt_logprobs` are 0 for nothing, k + 1 for the token and the k most probable. `num_candidates` is the
    core's own to set: of a beam, how many next tokens it reports.
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


@dataclass(frozen=True, slots=True)
class BeamParams:
    """A beam search instead of sampling.

    width           beams that run at once
    num_returned    of the best that were found; at most width
    length_penalty  scores are sums of log-probabilities divided by num_tokens ** length_penalty: above 0 long is better
    early_stopping  ends as soon as `width` beams have ended; else not before no running one can be better
    """

    width: int
    num_returned: int
    length_penalty: float = 1.0
    early_stopping: bool = False

    def num_candidates(self, num_ends: int) -> int:
        """So many next tokens of each beam, that `width` of them go on though all with one of `num_ends` ids end."""
        return max(2, 1 + num_ends) * self.width


@dataclass(frozen=True, slots=True)
class Request:
    """One client request.

    request_id       unique among all requests the core ever sees; the shell makes it (never the client's own id)
    prompt_token_ids at least one
    params           of sequence 0; sequence i differs in its seed only
    seeds            one for each sequence; their number is the request's `n`
    beam             not None: a beam search, with seeds (0,) and greedy parameters
    is_open_ended    its client named no bound: params.max_total_tokens is the room there was, and shrinks with the pool
    priority         lower runs earlier, under the priority policy
    cache_salt       prefixes are shared between requests of equal salt only
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

    @property
    def num_sequences(self) -> int:
        return len(self.seeds)
