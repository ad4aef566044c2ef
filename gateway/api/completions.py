"""POST /v1/completions: the body as requests to a scheduler, one for each prompt."""

from collections.abc import Sequence
from typing import Any

from gateway.api.completion_answer import CompletionChunks, CompletionCollector, CompletionOptions
from gateway.api.endpoint import EchoedPrompt, Head, ParsedRequest
from gateway.api.fields import Fields, shown
from gateway.api.sampling import IGNORED, NAMES, NEUTRAL, SHARED, StreamOptions, shared_request
from gateway.api.structured_output import add_structured_output
from quire.v1 import generation_pb2 as pb

MAX_PROMPTS = 256
MAX_COPIED_ITEMS = 1 << 17
"""Most token ids, entries of `logit_bias` and choices in the requests of all prompts but the first. Each request has a
copy of these fields, and the event loop makes the copies."""

MAX_COPIED_BYTES = 4 << 20
"""The same for the bytes of all fields beside the prompts."""

DEFAULT_MAX_TOKENS = 16

KNOWN = SHARED | {"prompt", "echo", "logprobs", "best_of"}
COMPLETION_NEUTRAL = NEUTRAL | {"suffix": ("",), "add_special_tokens": (True,), "prompt_embeds": ()}

_NAMES = NAMES | {
    **dict.fromkeys(("prompt", "text", "token_ids", "token_ids.ids"), "prompt"),
    "stopping.max_tokens": "max_tokens",
    "output.logprobs": "logprobs",
}


def parse_completion(body: object) -> ParsedRequest:
    """Returns the requests. Raises ApiError that names every bad field."""
    fields = Fields(body)
    fields.raise_problems()
    fields.check_names(KNOWN | IGNORED, COMPLETION_NEUTRAL)
    model = fields.text("model", "") or ""
    stream = StreamOptions(fields)
    shared = shared_request(fields)
    names = _NAMES | add_structured_output(fields, shared)
    echo = fields.flag("echo")
    max_tokens = fields.integer("max_tokens")
    if max_tokens == 0 and not echo:
        fields.add_problem("max_tokens", "must be at least 1 without echo")
    if max_tokens is None:
        max_tokens = DEFAULT_MAX_TOKENS
    # A scheduler generates at least one token; that token is then left out of the answer.
    shared.stopping.max_tokens = max(1, max_tokens)
    num_top, num_prompt_top = fields.integer("logprobs"), fields.integer("prompt_logprobs")
    num_returned = _check_number(fields, shared, stream)
    if num_returned is not None:
        names["sampling.n"] = "best_of"
    if num_top is not None:
        shared.output.logprobs = num_top
        shared.output.token_bytes = True
        if echo:
            shared.output.prompt_logprobs = max(num_top, num_prompt_top or 0)  # the answer has as many as each asks for
    elif num_returned is not None:
        shared.output.logprobs = 0  # to compare the sequences
    if stream.is_streamed and "prompt_logprobs" in fields:
        fields.add_problem("prompt_logprobs", "is not available with stream")
    requests = _requests(fields, shared)
    fields.raise_problems()
    options = CompletionOptions(
        num_choices=shared.sampling.n or 1,
        num_returned=num_returned,
        num_top=num_top,
        num_prompt_top=num_prompt_top,
        has_text=max_tokens > 0,
        stream=stream,
    )

    def chunks(head: Head, prompts: Sequence[EchoedPrompt]) -> CompletionChunks:
        return CompletionChunks(head, options, prompts)

    def collector(head: Head, prompts: Sequence[EchoedPrompt]) -> CompletionCollector:
        return CompletionCollector(head, options, prompts)

    return ParsedRequest(
        model, requests, names, "cmpl-", stream.is_streamed, chunks, collector, echo, echo and num_top is not None
    )


def _check_number(fields: Fields, shared: pb.GenerateRequest, stream: StreamOptions) -> int | None:
    """Reads `best_of`. Returns the number of choices to return if more are sampled; None: all are returned."""
    best_of = fields.integer("best_of", 1)
    n = fields.integer("n", 1) or 1
    if best_of is None or best_of == n:
        return None
    if best_of < n:
        fields.add_problem("best_of", f"must be at least n ({n}), not {best_of}")
        return None
    if stream.is_streamed:
        fields.add_problem("best_of", "must be equal to n with stream")
    if shared.sampling.beam_width:
        fields.add_problem("best_of", "must be absent with a beam search")
    shared.sampling.n = best_of
    return n


def _requests(fields: Fields, shared: pb.GenerateRequest) -> list[pb.GenerateRequest]:
    requests = []
    for prompt in _prompts(fields, _most_prompts(shared)):
        request = pb.GenerateRequest()
        request.CopyFrom(shared)
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
        requests.append(request)
    return requests


def _most_prompts(shared: pb.GenerateRequest) -> int:
    """Returns how many prompts may have the fields of `shared`."""
    sampling = shared.sampling
    num_items = len(sampling.allowed_token_ids) + len(sampling.logit_bias) + len(shared.structured_output.choice.texts)
    num_copies = min(MAX_COPIED_ITEMS // max(1, num_items), MAX_COPIED_BYTES // max(1, shared.ByteSize()))
    return min(MAX_PROMPTS, 1 + num_copies)


def _prompts(fields: Fields, most: int) -> list[str | list[int]]:
    """Reads `prompt`: a text, token ids, a list of texts, or a list of lists of token ids. Of lists, `most`."""
    value = fields.get("prompt")
    if isinstance(value, str):
        return [fields.check_text("prompt", value)]
    if not isinstance(value, list) or not value:
        fields.add_problem("prompt", "must be a string, a list of strings, token ids, or a list of lists of token ids")
        return []
    if type(value[0]) is int:
        return [fields.check_token_ids("prompt", value)]
    if len(value) > most:
        reason = "" if most == MAX_PROMPTS else " with other fields of this size"
        fields.add_problem("prompt", f"must be at most {most}{reason}, not {len(value)}")
        return []
    return [_one_prompt(fields, f"prompt[{i}]", each) for i, each in enumerate(value)]


def _one_prompt(fields: Fields, name: str, value: Any) -> str | list[int]:
    if isinstance(value, str):
        return fields.check_text(name, value)
    if isinstance(value, list) and value:
        return fields.check_token_ids(name, value)
    fields.add_problem(name, f"must be a string or token ids, not {shown(value)}")
    return ""
