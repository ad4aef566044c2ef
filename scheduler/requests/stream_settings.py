"""The settings that a response stream gets from its request."""

from collections.abc import Callable
from dataclasses import dataclass

from quire.v1 import generation_pb2 as pb


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
    num_cached_tokens           of a resumed stream: what its first stream has reported
    nameless_token_ids          special tokens, if the text has their names: the last token's name is left out
    token_bytes                 returns the bytes of a token, for log-probabilities; None: they are not requested
    follows_grammar             the output is restricted to a grammar
    new_continuation            makes the continuation of `Started` from the number of cached tokens; None: it has none
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
    num_cached_tokens: int | None = None
    follows_grammar: bool = False
    nameless_token_ids: frozenset[int] = frozenset()
    token_bytes: Callable[[int], bytes] | None = None
    new_continuation: Callable[[int], pb.Continuation] | None = None
