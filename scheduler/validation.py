"""The one validator. Every door brings an `IncomingRequest` here; only what comes out reaches the engine.

    incoming ── check ──► CheckedRequest ── tokenise (outside) ── complete ──► core Request

Both are pure: no clock, no I/O, no randomness but the seed that is passed in. `check` raises InvalidRequest with *all*
that is wrong, by field path; it looks at sizes before contents, so a hostile request costs no more than an honest one.
`complete` raises CapacityExceeded for what can never fit.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from scheduler.core import CapacityExceeded, InvalidRequest, Request, SequenceParams
from scheduler.generation_defaults import GenerationDefaults
from scheduler.incoming import ChatMessage, IncomingRequest, MessageLike, Stopping

MASK_64 = 2**64 - 1
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
    """

    max_prompt_bytes: int = 2 * 2**20
    max_chat_messages: int = 1024
    max_request_id_bytes: int = 256
    max_cache_salt_bytes: int = 256
    max_num_stop: int = 16
    max_stop_bytes: int = 256
    max_num_stop_token_ids: int = 64
    max_temperature: float = 100.0


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

    seeds       one for each sequence
    max_tokens  None: as many as there is room for
    """

    client_request_id: str
    text: str | None
    token_ids: list[int] | None
    chat: tuple[ChatMessage, ...] | None
    seeds: tuple[int, ...]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    max_tokens: int | None
    min_tokens: int
    stop: tuple[str, ...]
    include_stop: bool
    eos_token_ids: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
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
    checks = _Checks()
    sampling, stopping = incoming.sampling, incoming.stopping
    token_ids = _check_prompt(checks, incoming, limits, bounds)
    _refuse_unserved(checks, incoming)
    client_request_id = checks.text("request_id", incoming.request_id or "", limits.max_request_id_bytes)
    if not client_request_id.isprintable():
        checks.add("request_id", "must be printable")  # it is written to logs
    cache_salt = checks.text("cache_salt", incoming.cache_salt or "", limits.max_cache_salt_bytes)
    temperature = checks.number(
        "sampling.temperature", sampling.temperature, 0, limits.max_temperature, defaults.temperature
    )
    top_p = checks.number("sampling.top_p", sampling.top_p, 0, 1, defaults.top_p, above=True)
    top_k = checks.integer("sampling.top_k", sampling.top_k, 0, 2**32 - 1, defaults.top_k)
    min_p = checks.number("sampling.min_p", sampling.min_p, 0, 1, defaults.min_p)
    seed = checks.integer("sampling.seed", sampling.seed, 0, MASK_64, drawn_seed)
    n = checks.integer("sampling.n", sampling.n, 1, bounds.max_num_seqs, 1)
    min_tokens = _check_bounds_of_output(checks, stopping)
    checks.stop_strings("stopping.stop", stopping.stop, limits.max_num_stop, limits.max_stop_bytes)
    stop_token_ids: list[int] = []
    if checks.is_list("stopping.stop_token_ids", stopping.stop_token_ids, limits.max_num_stop_token_ids):
        stop_token_ids = checks.token_ids("stopping.stop_token_ids", stopping.stop_token_ids, bounds.vocab_size)
    ignore_eos = checks.flag("stopping.ignore_eos", stopping.ignore_eos)
    include_stop = checks.flag("stopping.include_stop", stopping.include_stop)
    priority = checks.integer("priority", incoming.priority, -(2**31), 2**31 - 1, 0)
    checks.finish()
    if incoming.token_ids is not None and len(incoming.token_ids) >= bounds.max_tokens_per_sequence:
        raise _too_long(len(incoming.token_ids), 1, bounds)
    return CheckedRequest(
        client_request_id=client_request_id,
        text=incoming.text,
        token_ids=token_ids,
        chat=None if incoming.chat is None else tuple(ChatMessage(m.role, m.content) for m in incoming.chat),
        seeds=tuple(sample_seed(seed, index) for index in range(n)),
        # Below this, float32 logits divided by the temperature are greedy in all but name, or overflow.
        temperature=temperature if temperature >= 1e-5 else 0.0,
        top_p=top_p,
        top_k=top_k if top_k < bounds.vocab_size else 0,
        min_p=min_p,
        max_tokens=stopping.max_tokens,
        min_tokens=min_tokens,
        stop=_unique(stopping.stop),
        include_stop=include_stop,
        eos_token_ids=() if ignore_eos else tuple(i for i in defaults.eos_token_ids if i < bounds.vocab_size),
        stop_token_ids=_unique(stop_token_ids),
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
        params=SequenceParams(
            max_total_tokens=(
                bounds.max_tokens_per_sequence if checked.max_tokens is None else num_prompt_tokens + checked.max_tokens
            ),
            min_total_tokens=num_prompt_tokens + checked.min_tokens if checked.min_tokens else 0,
            temperature=checked.temperature,
            top_k=checked.top_k,
            top_p=checked.top_p,
            min_p=checked.min_p,
            seed=checked.seeds[0],
            eos_token_ids=checked.eos_token_ids,
            stop_token_ids=checked.stop_token_ids,
        ),
        seeds=checked.seeds,
        priority=checked.priority,
        cache_salt=checked.cache_salt,
        deadline_s=deadline_s,
    )


def sample_seed(seed: int, index: int) -> int:
    """Seed of sequence `index`: the request's own for the first, so that n = 1 and the first of n agree; for the
    others output number `index` of SplitMix64 started at it (Steele, Lea and Flood, OOPSLA 2014).
    """
    if index == 0:
        return seed
    mixed = (seed + index * 0x9E3779B97F4A7C15) & MASK_64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK_64
    return mixed ^ (mixed >> 31)


def _too_long(num_prompt_tokens: int, num_output_tokens: int, bounds: ModelBounds) -> CapacityExceeded:
    return CapacityExceeded(
        f"{num_prompt_tokens} prompt tokens and {num_output_tokens} of output are more than the "
        f"{bounds.max_tokens_per_sequence} that one sequence can hold here"
    )


def _check_prompt(
    checks: "_Checks", incoming: IncomingRequest, limits: RequestLimits, bounds: ModelBounds
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


def _check_chat(checks: "_Checks", messages: Sequence[MessageLike], limits: RequestLimits, bounds: ModelBounds) -> None:
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


def _check_bounds_of_output(checks: "_Checks", stopping: Stopping) -> int:
    """Returns min_tokens. `max_tokens` may stay None; whether there is room for them is asked later."""
    min_tokens = checks.integer("stopping.min_tokens", stopping.min_tokens, 0, 2**32 - 1, 0)
    max_tokens = checks.integer("stopping.max_tokens", stopping.max_tokens, 1, 2**32 - 1, 2**32 - 1)
    if min_tokens > max_tokens:
        checks.add("stopping.min_tokens", f"must be at most max_tokens ({max_tokens}), not {min_tokens}")
    return min_tokens


def _refuse_unserved(checks: "_Checks", incoming: IncomingRequest) -> None:
    sampling, output = incoming.sampling, incoming.output
    unserved = {
        "sampling.repetition_penalty": sampling.repetition_penalty not in (None, 1),
        "sampling.frequency_penalty": sampling.frequency_penalty not in (None, 0),
        "sampling.presence_penalty": sampling.presence_penalty not in (None, 0),
        "sampling.beam_width": sampling.beam_width not in (None, 0),
        "sampling.logit_bias": len(sampling.logit_bias) > 0,
        "sampling.allowed_token_ids": len(sampling.allowed_token_ids) > 0,
        "output.logprobs": output.logprobs is not None,
        "output.prompt_logprobs": output.prompt_logprobs is not None,
    }
    for field, is_asked_for in unserved.items():
        if is_asked_for:
            checks.add(field, "is not served yet; leave it out")


class _Checks:
    """Collects what is wrong. Each check returns the value if it is right, and something harmless if it is not."""

    def __init__(self) -> None:
        self.violations: dict[str, str] = {}

    def add(self, field: str, problem: str) -> None:
        self.violations.setdefault(field, problem)

    def finish(self) -> None:
        if self.violations:
            raise InvalidRequest(self.violations)

    def integer(self, field: str, value: int | None, least: int, most: int, default: int) -> int:
        if value is None:
            return default
        if type(value) is not int or not least <= value <= most:  # bool is an int, too
            self.add(field, f"must be a whole number from {least} to {most}, not {_shown(value)}")
            return default
        return value

    def number(
        self,
        field: str,
        value: float | None,
        least: float,
        most: float,
        default: float,
        *,
        above: bool = False,
    ) -> float:
        """`above`: it must be greater than `least`. NaN is in no range."""
        if value is None:
            return default
        is_number = type(value) is float or type(value) is int
        if not is_number or not least <= value <= most or (above and value == least):
            words = f"above {least} and at most {most}" if above else f"from {least} to {most}"
            self.add(field, f"must be a number {words}, not {_shown(value)}")
            return default
        return float(value)

    def flag(self, field: str, value: bool | None) -> bool:
        if value is None or isinstance(value, bool):
            return bool(value)
        self.add(field, f"must be true or false, not {_shown(value)}")
        return False

    def text(self, field: str, value: str, max_bytes: int) -> str:
        if not isinstance(value, str):
            self.add(field, f"must be a string, not {_shown(value)}")
            return ""
        if len(value) > max_bytes:  # before it is encoded: a character has at least one byte
            self.add(field, f"must have at most {max_bytes} bytes, not {len(value)} and more")
            return ""
        try:
            num_bytes = len(value.encode())
        except UnicodeEncodeError:
            self.add(field, "must be Unicode text, without lone surrogates")
            return ""
        if num_bytes > max_bytes:
            self.add(field, f"must have at most {max_bytes} bytes, not {num_bytes}")
            return ""
        return value

    def stop_strings(self, field: str, values: Sequence[str], max_num: int, max_bytes: int) -> None:
        if self.is_list(field, values, max_num):
            for i, value in enumerate(values):
                if self.text(f"{field}[{i}]", value, max_bytes) == "":
                    self.add(f"{field}[{i}]", "must not be empty")

    def token_ids(self, field: str, values: Sequence[int], vocab_size: int) -> list[int]:
        """Returns them all as a list, or names the first that is wrong."""
        token_ids = list(values)
        # In bulk first: a prompt may have 100,000 of them, nearly always good.
        if not token_ids:
            return token_ids
        if set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < vocab_size:
            return token_ids
        for i, value in enumerate(token_ids):
            if type(value) is not int or not 0 <= value < vocab_size:
                problem = f"must be a token id from 0 to {vocab_size - 1}, not {_shown(value)}"
                self.add(f"{field}[{i}]", problem)
                break
        return []

    def is_list(self, field: str, values: object, max_num: int | None = None) -> bool:
        if not isinstance(values, Sequence) or isinstance(values, str | bytes):
            self.add(field, f"must be a list, not {_shown(values)}")
            return False
        if max_num is not None and len(values) > max_num:
            self.add(field, f"must be at most {max_num}, not {len(values)}")
            return False
        return True


def _unique(values: Iterable[T]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(values))


def _shown(value: object) -> str:
    """A value as a message can carry it. Numbers of more than 4300 digits have no decimal form in Python."""
    try:
        text = repr(value)
    except ValueError:
        return "a number beyond all bounds"
    return text if len(text) <= 40 else f"{text[:37]}…"
