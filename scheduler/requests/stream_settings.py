"""The settings that a response stream gets from its request."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """The part of a request that shapes its responses.

    client_request_id           reported in `Started`
    num_prompt_tokens
    num_sequences               sequences that the client receives
    ending_token_ids            EOS and stop ids; such a token is always the last one of a sequence
    stop, include_stop, min_tokens
    num_logprobs                log-probabilities for each token, its own included; 0: none
    num_prompt_logprobs         the same for each prompt token but the first
    """

    client_request_id: str
    num_prompt_tokens: int
    num_sequences: int = 1
    ending_token_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    num_logprobs: int = 0
    num_prompt_logprobs: int = 0
