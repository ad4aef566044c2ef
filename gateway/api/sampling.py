"""The fields that chat completions and completions share: sampling, stopping, and what they accept and ignore.

The rule for all other fields: one that cannot change the text is accepted and ignored; one that would change it and is
not supported is refused, unless it has the value that means the same as leaving it out; any other name is refused.
"""

from typing import Any

from gateway.api.fields import MAX_UINT32, Fields
from quire.v1 import generation_pb2 as pb

NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "length_penalty",
)
"""Numbers with the same name in `SamplingParams`."""

# These bounds are those of the scheduler. Here they keep the event loop from reading what it would refuse.
MAX_STOP = 16
MAX_STOP_TOKEN_IDS = 64
MAX_ALLOWED_TOKEN_IDS = 65_536
MAX_LOGIT_BIAS = 1024

SHARED = frozenset(
    {
        *NUMBERS,
        "model", "stream", "stream_options", "n", "seed", "stop", "logit_bias", "max_tokens", "top_k", "min_tokens",
        "ignore_eos", "stop_token_ids", "allowed_token_ids", "include_stop_str_in_output", "prompt_logprobs",
        "beam_width", "use_beam_search", "early_stopping", "cache_salt", "priority", "request_id", "response_format",
        "structured_outputs",
    }
)  # fmt: skip

IGNORED = frozenset(
    {
        "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "prompt_cache_options", "prediction",
    }
)  # fmt: skip

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "bad_words": ([],),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "logits_processors": ([],),
    "logits_processor_pattern": (),
    "truncate_prompt_tokens": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "detokenize": (True,),
    "mm_processor_kwargs": ({},),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "lora_request": (),
    "lora_path": (),
}
"""Fields that would change the answer and are not supported, with the values that mean the same as leaving them out."""

NAMES = {
    **{f"sampling.{name}": name for name in (*NUMBERS, "top_k", "seed", "n", "beam_width", "logit_bias")},
    **{f"sampling.{name}": name for name in ("allowed_token_ids", "early_stopping")},
    **{f"stopping.{name}": name for name in ("max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos")},
    "stopping.include_stop": "include_stop_str_in_output",
    "output.prompt_logprobs": "prompt_logprobs",
    **{name: name for name in ("request_id", "priority", "cache_salt")},
}
"""The JSON name of each field of `GenerateRequest`."""


def shared_request(fields: Fields) -> pb.GenerateRequest:
    """Returns a request without prompt, `max_tokens` and log-probabilities."""
    request = pb.GenerateRequest()
    sampling, stopping = request.sampling, request.stopping
    for name in NUMBERS:
        if (number := fields.number(name)) is not None:
            setattr(sampling, name, number)
    if (top_k := fields.integer("top_k", -1)) is not None:
        sampling.top_k = max(0, top_k)  # vLLM's -1 means all, as 0 does here
    if (seed := fields.integer("seed", -(2**63), 2**64 - 1)) is not None:
        sampling.seed = seed % 2**64
    _set_number_of_sequences(fields, sampling)
    if "early_stopping" in fields:
        sampling.early_stopping = fields.flag("early_stopping")
    sampling.allowed_token_ids.extend(fields.token_ids("allowed_token_ids", MAX_ALLOWED_TOKEN_IDS))
    for key, bias in fields.few_entries("logit_bias", MAX_LOGIT_BIAS).items():
        name = f"logit_bias[{key[:20]}]"
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= MAX_UINT32):
            fields.add_problem(name, "must be of a token id")
        elif bias is not None:
            sampling.logit_bias[int(key)] = fields.check_number(name, bias)
    if (min_tokens := fields.integer("min_tokens")) is not None:
        stopping.min_tokens = min_tokens
    stopping.stop.extend(_stop_strings(fields))
    stopping.stop_token_ids.extend(fields.token_ids("stop_token_ids", MAX_STOP_TOKEN_IDS))
    stopping.ignore_eos = fields.flag("ignore_eos")
    stopping.include_stop = fields.flag("include_stop_str_in_output")
    if (num_top := fields.integer("prompt_logprobs")) is not None:
        request.output.prompt_logprobs = num_top
        request.output.token_bytes = True
    if (priority := fields.integer("priority", -(2**31), 2**31 - 1)) is not None:
        request.priority = priority
    _set_cache_salt(fields, request)
    request.request_id = fields.text("request_id") or ""
    return request


def plain_request(fields: Fields, max_tokens: str) -> pb.GenerateRequest:
    """Returns a request for one sequence, of APIs that know few options. `max_tokens` is the field with the bound."""
    request = pb.GenerateRequest()
    for name in ("temperature", "top_p"):
        if (number := fields.number(name)) is not None:
            setattr(request.sampling, name, number)
    request.sampling.n = 1  # a checkpoint's default could be another one
    if (bound := fields.integer(max_tokens)) is not None:
        request.stopping.max_tokens = bound
    _set_cache_salt(fields, request)
    return request


def _set_cache_salt(fields: Fields, request: pb.GenerateRequest) -> None:
    if (salt := fields.text("cache_salt")) is not None:
        request.cache_salt = salt


def _set_number_of_sequences(fields: Fields, sampling: pb.SamplingParams) -> None:
    n = fields.integer("n")
    sampling.n = 1 if n is None else n  # a checkpoint's default could be another one
    width = fields.integer("beam_width")
    if fields.flag("use_beam_search") and not width:
        width = n or 1  # as in vLLM
    if width:
        sampling.beam_width = width


def _stop_strings(fields: Fields) -> list[str]:
    value = fields.get("stop")
    if isinstance(value, str):
        return [fields.check_text("stop", value)]
    return fields.texts("stop", MAX_STOP)


class StreamOptions:
    """The fields `stream` and `stream_options`.

    is_streamed       chunks as server-sent events, instead of one response
    has_usage         a last chunk with the usage
    has_usage_always  the usage so far in every chunk, as vLLM's `continuous_usage_stats`
    """

    __slots__ = ("has_usage", "has_usage_always", "is_streamed")

    def __init__(self, fields: Fields) -> None:
        self.is_streamed = fields.flag("stream")
        self.has_usage = self.has_usage_always = False
        options = fields.nested("stream_options")
        if options is None:
            return
        options.check_names({"include_usage", "continuous_usage_stats", "include_obfuscation"})
        if not self.is_streamed:
            fields.add_problem("stream_options", "is allowed only with stream")
        options.flag("include_obfuscation")
        self.has_usage = options.flag("include_usage")
        self.has_usage_always = options.flag("continuous_usage_stats") and self.has_usage
