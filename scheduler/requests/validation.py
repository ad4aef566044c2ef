"""The one validator. Every door brings an `IncomingRequest` here; only what comes out reaches the engine.

    incoming ── check ──► CheckedRequest ── tokenise (outside) ── complete ──► core Request

Both are pure: no clock, no I/O, no randomness but the seed that is passed in. `check` raises InvalidRequest with *all*
that is wrong, up to 64 fields; it looks at sizes before contents: a hostile request costs no more than an honest one.
`complete` raises CapacityExceeded for what can never fit.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from scheduler.core import BeamParams, CapacityExceeded, InvalidRequest, Request, SequenceParams
from scheduler.requests.field_checks import FieldChecks
from scheduler.requests.generation_defaults import MAX_REPETITION_PENALTY, MIN_REPETITION_PENALTY, GenerationDefaults
from scheduler.requests.incoming import ChatMessage, IncomingRequest, MessageLike, Sampling, Stopping
from scheduler.requests.seeds import MASK_64, sample_seed

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Bounds that do not depend on the model.

    max_prompt_bytes        of text, or of all roles and contents of a chat, in UTF-8, before it is tokenised
    max_chat_messages       messages of a chat
    max_request_id_bytes    of the client's id
    max_cache_salt_bytes
    max_num_stop            stop strings
    max_stop_bytes          of each of them
    max_num_stop_token_ids
    max_temperature
    max_beam_width           the model and max_num_seqs may allow less
    max_length_penalty       and its negative the least: a length to its power stays a float
    max_num_logprobs         most probable tokens reported with each token
    max_num_logit_bias       entries
    max_logit_bias           and its negative the least
    max_num_allowed_token_ids
    max_output_penalty       of frequency and presence, and its negative the least
    """

    max_prompt_bytes: int = 2 * 2**20
    max_chat_messages: int = 1024
    max_request_id_bytes: int = 256
    max_cache_salt_bytes: int = 256
    max_num_stop: int = 16
    max_stop_bytes: int = 256
    max_num_stop_token_ids: int = 64
    max_temperature: float = 100.0
    max_beam_width: int = 64
    max_length_penalty: float = 10.0
    max_num_logprobs: int = 20
    max_num_logit_bias: int = 1024
    max_logit_bias: float = 100.0
    max_num_allowed_token_ids: int = 65536
    max_output_penalty: float = 2.0


@dataclass(frozen=True, slots=True)
class ModelBounds:
    """Bounds of the model that is served.

    vocab_size                width of the logits; every token id is below it
    max_num_seqs              sequences that can run at once
    max_tokens_per_sequence   prompt and output, as the model and the pool allow
    has_chat_template
    """

    vocab_size: int
    max_num_seqs: int
    max_tokens_per_sequence: int
    has_chat_template: bool = False


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """All is resolved but the prompt's tokens. Of `text`, `token_ids` and `chat`, one is not None.

    params      of its sequences, but for the seed and the bounds of their length: those want the prompt
    seeds       one for each sequence; of a beam search, (0,)
    beam        None: no beam search
    max_tokens  None: as many as there is room for
    """

    client_request_id: str
    text: str | None
    token_ids: list[int] | None
    chat: tuple[ChatMessage, ...] | None
    params: SequenceParams
    seeds: tuple[int, ...]
    beam: BeamParams | None
    max_tokens: int | None
    min_tokens: int
    stop: tuple[str, ...]
    include_stop: bool
    priority: int
    cache_salt: bytes


def check(
    incoming: IncomingRequest,
    limits: RequestLimits,
    bounds: ModelBounds,
    defaults: GenerationDefaults,
    drawn_seed: int,
) -> CheckedRequest:
    """`drawn_seed` (64 random bits) is used where the request has no seed.

    Raises InvalidRequest; or CapacityExceeded, where nothing but the number of prompt token ids is wrong.
    """
    checks = FieldChecks()
    token_ids = _check_prompt(checks, incoming, limits, bounds)
    client_request_id = checks.text("request_id", incoming.request_id or "", limits.max_request_id_bytes)
    if not client_request_id.isprintable():
        checks.add("request_id", "must be printable")  # it is written to logs
    cache_salt = checks.text("cache_salt", incoming.cache_salt or "", limits.max_cache_salt_bytes)
    priority = checks.integer("priority", incoming.priority, -(2**31), 2**31 - 1, 0)
    stopping = _check_stopping(checks, incoming.stopping, limits, bounds, defaults)
    beam_width = _check_beam_width(checks, incoming, limits, bounds, stopping)
    params = _check_params(checks, incoming, limits, bounds, defaults, stopping, is_beam=beam_width > 0)
    beam = _check_beam(checks, incoming.sampling, limits, beam_width)
    seed = checks.integer("sampling.seed", incoming.sampling.seed, 0, MASK_64, drawn_seed)
    n = checks.integer("sampling.n", incoming.sampling.n, 1, bounds.max_num_seqs, 1)
    checks.finish()
    if incoming.token_ids is not None and len(incoming.token_ids) >= bounds.max_tokens_per_sequence:
        raise _too_long(len(incoming.token_ids), 1, bounds)
    return CheckedRequest(
        client_request_id=client_request_id,
        text=incoming.text,
        token_ids=token_ids,
        chat=None if incoming.chat is None else tuple(ChatMessage(m.role, m.content) for m in incoming.chat),
        params=params,
        seeds=tuple(sample_seed(seed, index) for index in range(n)) if beam is None else (0,),
        beam=beam,
        max_tokens=stopping.max_tokens,
        min_tokens=stopping.min_tokens,
        stop=stopping.stop,
        include_stop=stopping.include_stop,
        priority=priority,
        cache_salt=cache_salt.encode(),
    )


def complete(
    checked: CheckedRequest,
    prompt_token_ids: list[int],
    bounds: ModelBounds,
    *,
    request_id: int,
    deadline_s: float | None,
) -> Request:
    """The core's request. Raises InvalidRequest for a prompt that has no token, or one that the model lacks (a
    tokenizer can know more tokens than the model), CapacityExceeded if prompt and output can never fit.
    """
    if not prompt_token_ids:
        raise InvalidRequest({"prompt": "has no tokens"})
    if max(prompt_token_ids) >= bounds.vocab_size:
        raise InvalidRequest({"prompt": f"has the token {max(prompt_token_ids)}, which the model lacks"})
    num_prompt_tokens = len(prompt_token_ids)
    num_output_tokens = max(1, checked.max_tokens or 0, checked.min_tokens)
    if num_prompt_tokens + num_output_tokens > bounds.max_tokens_per_sequence:
        raise _too_long(num_prompt_tokens, num_output_tokens, bounds)
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        params=replace(
            checked.params,
            max_total_tokens=(
                bounds.max_tokens_per_sequence if checked.max_tokens is None else num_prompt_tokens + checked.max_tokens
            ),
            min_total_tokens=num_prompt_tokens + checked.min_tokens if checked.min_tokens else 0,
            seed=checked.seeds[0],
        ),
        seeds=checked.seeds,
        priority=checked.priority,
        cache_salt=checked.cache_salt,
        deadline_s=deadline_s,
        beam=checked.beam,
        is_open_ended=checked.max_tokens is None,
    )


def _too_long(num_prompt_tokens: int, num_output_tokens: int, bounds: ModelBounds) -> CapacityExceeded:
    return CapacityExceeded(
        f"{num_prompt_tokens} prompt tokens and {num_output_tokens} of output are more than the "
        f"{bounds.max_tokens_per_sequence} that one sequence can hold here"
    )


def _check_prompt(
    checks: FieldChecks, incoming: IncomingRequest, limits: RequestLimits, bounds: ModelBounds
) -> list[int] | None:
    """Returns the token ids, if it has any."""
    given = [name for name in ("text", "token_ids", "chat") if getattr(incoming, name) is not None]
    if len(given) != 1:
        checks.add("prompt", f"must be one of text, token_ids and chat, not {' and '.join(given) or 'none'}")
    if incoming.text is not None:
        checks.text("text", incoming.text, limits.max_prompt_bytes)
    if incoming.chat is not None and checks.is_list("chat.messages", incoming.chat):
        _check_chat(checks, incoming.chat, limits, bounds)
    if incoming.token_ids is None or not checks.is_list("token_ids.ids", incoming.token_ids):
        return None
    if not incoming.token_ids:
        checks.add("token_ids.ids", "must not be empty")
    if len(incoming.token_ids) >= bounds.max_tokens_per_sequence:
        return None  # a matter of capacity, and not worth a look at each
    return checks.token_ids("token_ids.ids", incoming.token_ids, bounds.vocab_size)


def _check_chat(
    checks: FieldChecks, messages: Sequence[MessageLike], limits: RequestLimits, bounds: ModelBounds
) -> None:
    if not bounds.has_chat_template:
        checks.add("chat", "this model has no chat template")
    if not 1 <= len(messages) <= limits.max_chat_messages:
        checks.add("chat.messages", f"must be from 1 to {limits.max_chat_messages}, not {len(messages)}")
        return
    room = limits.max_prompt_bytes
    for i, message in enumerate(messages):
        role = checks.text(f"chat.messages[{i}].role", message.role, room)
        if not role:
            checks.add(f"chat.messages[{i}].role", "must not be empty")
        room -= len(role.encode())
        content = checks.text(f"chat.messages[{i}].content", message.content, room)
        room -= len(content.encode())
        if checks.violations:
            return  # one bad message tells enough


@dataclass(frozen=True, slots=True)
class _Stopping:
    """`max_tokens` may stay None; whether there is room for them is asked later."""

    max_tokens: int | None
    min_tokens: int
    stop: tuple[str, ...]
    include_stop: bool
    eos_token_ids: tuple[int, ...]
    stop_token_ids: tuple[int, ...]

    @property
    def ending_token_ids(self) -> frozenset[int]:
        return frozenset(self.eos_token_ids + self.stop_token_ids)


def _check_stopping(
    checks: FieldChecks, stopping: Stopping, limits: RequestLimits, bounds: ModelBounds, defaults: GenerationDefaults
) -> _Stopping:
    min_tokens = checks.integer("stopping.min_tokens", stopping.min_tokens, 0, 2**32 - 1, 0)
    max_tokens = checks.integer("stopping.max_tokens", stopping.max_tokens, 1, 2**32 - 1, 2**32 - 1)
    if min_tokens > max_tokens:
        checks.add("stopping.min_tokens", f"must be at most max_tokens ({max_tokens}), not {min_tokens}")
    stop = checks.stop_strings("stopping.stop", stopping.stop, limits.max_num_stop, limits.max_stop_bytes)
    stop_token_ids = checks.token_ids(
        "stopping.stop_token_ids", stopping.stop_token_ids, bounds.vocab_size, limits.max_num_stop_token_ids
    )
    ignore_eos = checks.flag("stopping.ignore_eos", stopping.ignore_eos)
    return _Stopping(
        max_tokens=stopping.max_tokens,
        min_tokens=min_tokens,
        stop=_unique(stop),
        include_stop=checks.flag("stopping.include_stop", stopping.include_stop),
        eos_token_ids=() if ignore_eos else tuple(i for i in defaults.eos_token_ids if i < bounds.vocab_size),
        stop_token_ids=_unique(stop_token_ids),
    )


def _check_params(
    checks: FieldChecks,
    incoming: IncomingRequest,
    limits: RequestLimits,
    bounds: ModelBounds,
    defaults: GenerationDefaults,
    stopping: _Stopping,
    *,
    is_beam: bool,
) -> SequenceParams:
    """All but the seed and the bounds of length. Those of a beam search are greedy, whatever the checkpoint says."""
    sampling, output = incoming.sampling, incoming.output
    temperature = checks.number(
        "sampling.temperature", sampling.temperature, 0, limits.max_temperature, defaults.temperature
    )
    top_p = checks.number("sampling.top_p", sampling.top_p, 0, 1, defaults.top_p, above=True)
    top_k = checks.integer("sampling.top_k", sampling.top_k, 0, 2**32 - 1, defaults.top_k)
    min_p = checks.number("sampling.min_p", sampling.min_p, 0, 1, defaults.min_p)
    if is_beam:
        temperature, top_p, top_k, min_p = 0.0, 1.0, 0, 0.0
    biases = checks.token_biases(
        "sampling.logit_bias",
        sampling.logit_bias,
        bounds.vocab_size,
        limits.max_num_logit_bias,
        limits.max_logit_bias,
    )
    return SequenceParams(
        max_total_tokens=0,
        # Below this, float32 logits divided by the temperature are greedy in all but name, or overflow.
        temperature=temperature if temperature >= 1e-5 else 0.0,
        top_p=top_p,
        top_k=top_k if top_k < bounds.vocab_size else 0,
        min_p=min_p,
        eos_token_ids=stopping.eos_token_ids,
        stop_token_ids=stopping.stop_token_ids,
        allowed_token_ids=_check_allowed(checks, sampling, limits, bounds, stopping),
        bias_token_ids=tuple(biases),
        bias_values=tuple(biases.values()),
        repetition_penalty=checks.number(
            "sampling.repetition_penalty",
            sampling.repetition_penalty,
            MIN_REPETITION_PENALTY,
            MAX_REPETITION_PENALTY,
            defaults.repetition_penalty,
        ),
        frequency_penalty=_output_penalty(checks, limits, "frequency_penalty", sampling.frequency_penalty),
        presence_penalty=_output_penalty(checks, limits, "presence_penalty", sampling.presence_penalty),
        num_logprobs=_num_logprobs(checks, limits, bounds, "logprobs", output.logprobs),
        num_prompt_logprobs=_num_logprobs(checks, limits, bounds, "prompt_logprobs", output.prompt_logprobs),
    )


def _output_penalty(checks: FieldChecks, limits: RequestLimits, name: str, value: float | None) -> float:
    return checks.number(f"sampling.{name}", value, -limits.max_output_penalty, limits.max_output_penalty, 0.0)


def _num_logprobs(checks: FieldChecks, limits: RequestLimits, bounds: ModelBounds, name: str, value: int | None) -> int:
    """How many for each token, its own included; 0: none asked for."""
    num_top = checks.integer(f"output.{name}", value, 0, min(limits.max_num_logprobs, bounds.vocab_size), 0)
    return 0 if value is None else num_top + 1


def _check_allowed(
    checks: FieldChecks, sampling: Sampling, limits: RequestLimits, bounds: ModelBounds, stopping: _Stopping
) -> tuple[int, ...]:
    field = "sampling.allowed_token_ids"
    allowed = checks.token_ids(field, sampling.allowed_token_ids, bounds.vocab_size, limits.max_num_allowed_token_ids)
    # Where no ending token may come yet and no other ever, there is nothing to sample from.
    if stopping.min_tokens and stopping.ending_token_ids.issuperset(allowed or range(bounds.vocab_size)):
        checks.add(field, "must have a token that does not end the text, since min_tokens wants some")
    return _unique(allowed)


def _check_beam_width(
    checks: FieldChecks, incoming: IncomingRequest, limits: RequestLimits, bounds: ModelBounds, stopping: _Stopping
) -> int:
    """0: no beam search. Names what cannot go together with one."""
    sampling, output = incoming.sampling, incoming.output
    most = min(limits.max_beam_width, bounds.max_num_seqs)
    width = checks.integer("sampling.beam_width", sampling.beam_width, 0, most, 0)
    num_candidates = max(2, 1 + len(stopping.ending_token_ids)) * width
    if num_candidates > bounds.vocab_size:
        checks.add(
            "sampling.beam_width",
            f"needs {num_candidates} different tokens to choose from, and the model has {bounds.vocab_size}",
        )
    if width == 0:
        return 0
    if sampling.temperature is not None and sampling.temperature != 0:
        checks.add("sampling.temperature", "must be absent or 0 with beam_width: a beam search draws no random numbers")
    for name in ("top_p", "top_k", "min_p", "seed"):
        if getattr(sampling, name) is not None:
            checks.add(f"sampling.{name}", "must be absent with beam_width: a beam search draws no random numbers")
    if type(sampling.n) is int and sampling.n > width:
        checks.add("sampling.n", f"must be at most beam_width ({width}), not {sampling.n}")
    if stopping.stop:
        checks.add("stopping.stop", "must be empty with beam_width; stop_token_ids may be used")
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(output, name) is not None:
            checks.add(f"output.{name}", "must be absent with beam_width")
    return width


def _check_beam(checks: FieldChecks, sampling: Sampling, limits: RequestLimits, width: int) -> BeamParams | None:
    most = limits.max_length_penalty
    length_penalty = checks.number("sampling.length_penalty", sampling.length_penalty, -most, most, 1.0)
    early_stopping = checks.flag("sampling.early_stopping", sampling.early_stopping)
    if width == 0:
        for name in ("length_penalty", "early_stopping"):
            if getattr(sampling, name) is not None and sampling.beam_width in (None, 0):
                checks.add(f"sampling.{name}", "must be absent without beam_width")
        return None
    num_returned = sampling.n if type(sampling.n) is int else 1
    return BeamParams(width, num_returned, length_penalty, early_stopping)


def _unique(values: Iterable[T]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(values))
