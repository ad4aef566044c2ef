"""The options of a request, declared once: for both clients, for the message that is sent, and for the flags."""

from collections.abc import Mapping, Sequence
from typing import TypedDict


class GenerateOptions(TypedDict, total=False):
    """All options of `generate` and `complete`, by the names of their fields in generation.proto.

    An option that is absent or None takes the checkpoint's default, or else the one in generation.proto. `stop` may be
    one string or several.

    max_tokens          most tokens to generate
    min_tokens          fewest tokens to generate
    temperature         0: greedy
    top_p               in (0, 1]
    top_k               0: all
    min_p               in [0, 1]
    seed                same seed, same tokens
    n                   sequences sampled from the prompt, or beams shown
    beam_width          search for the most probable text with this many beams
    length_penalty      of beams: above 0 favours long ones
    early_stopping      of beams: end with the last one
    repetition_penalty  1: none
    frequency_penalty   for each time a token was generated
    presence_penalty    for each token that was generated
    logit_bias          added to a token's logit
    allowed_token_ids   no other token
    logprobs            show log-probabilities, and those of this many other tokens
    prompt_logprobs     the same for the prompt's tokens
    stop                ends the text
    stop_token_ids      ends the sequence
    include_stop        keep what ended the text
    ignore_eos          go on after EOS
    priority            lower runs earlier, under that policy
    cache_salt          share prefixes only with requests of this salt
    request_id          for logs; the server makes one if it is absent
    """

    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    n: int | None
    beam_width: int | None
    length_penalty: float | None
    early_stopping: bool | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None
    logprobs: int | None
    prompt_logprobs: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    include_stop: bool | None
    ignore_eos: bool | None
    priority: int | None
    cache_salt: str | None
    request_id: str | None
