"""Validates all requests, independent of the protocol that carried them.

    RequestFields ──► RequestChecker ── tokenise (elsewhere) ── complete ──► core Request

Validation is pure: no clock, no I/O, and no randomness except for the seed that is passed in. It reports *all*
violations, up to 64, and checks sizes before contents, so that a hostile request costs no more than an honest one.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

from scheduler.core import DEFAULT_TENANT, BeamParams, InvalidRequest, Request, SequenceParams
from scheduler.requests.chat_fields import read_chat
from scheduler.requests.generation_defaults import GenerationDefaults
from scheduler.requests.limits import ModelBounds, RequestLimits
from scheduler.requests.request_fields import RequestFields, largest_id
from scheduler.requests.resumption import Lengths, ReceivedSequence, check_received, read_resumption
from scheduler.requests.salts import tenant_salt
from scheduler.requests.sampling_params import SAMPLING_PARAMS
from scheduler.requests.seeds import MASK_64, sample_seed
from scheduler.requests.stream_settings import StreamSettings
from scheduler.requests.structured_output import GROUP, NO_GRAMMARS, read_structured_output

T = TypeVar("T")

MAX_UINT32 = 2**32 - 1

MIN_TEMPERATURE = 1e-5
"""Temperatures below this count as 0: dividing float32 logits by them overflows or leaves one token."""


class RequestChecker:
    """Checks the fields of one request, and makes the core's request once its prompt is tokenised.

    Exactly one of these is not None:

    text        to be tokenised
    token_ids   the prompt itself; also that of a resumed stream, whose text or chat is checked and not used
    chat        to be rendered and tokenised
    """

    def __init__(
        self,
        fields: RequestFields,
        limits: RequestLimits,
        bounds: ModelBounds,
        defaults: GenerationDefaults,
        drawn_seed: int,
    ) -> None:
        """Checks everything but the length of a prompt that is not tokenised yet.

        `drawn_seed` (64 random bits) is used if the request has no seed. Raises InvalidRequest with all violations, or
        CapacityExceeded if the only problem is the number of prompt token ids.
        """
        self._fields = fields
        self._limits = limits
        self._bounds = bounds
        self._defaults = defaults
        self.resumption = read_resumption(fields, bounds)
        self.is_resumable = fields.flag("resumable")
        self.has_token_bytes = fields.flag("output.token_bytes")
        self.shows_special_tokens = fields.flag("output.special_tokens")
        self.token_ids = self._check_prompt()
        self._client_request_id = self._check_request_id()
        self._cache_salt = fields.text("cache_salt", limits.max_cache_salt_bytes).encode()
        self._priority = fields.integer("priority", -(2**31), 2**31 - 1, 0)
        self._check_stopping()
        self.grammar = read_structured_output(fields, limits, bounds, has_eos=bool(defaults.eos_token_ids))
        """The definition of the output's grammar, to be compiled; None if there is none."""
        beam_width = self._check_beam_width()
        self._params = self._check_params(is_beam=beam_width > 0)
        self._beam = self._check_beam(beam_width)
        self._seeds = self._check_seeds(self.resumption.seed if self.resumption else drawn_seed)
        self.outputs: tuple[ReceivedSequence, ...] = ()
        if self.resumption is not None:
            fields.raise_violations()  # a wrong parameter is not one with which another server began the stream
            self.token_ids = self.resumption.prompt_token_ids
            num_results = self._beam.num_returned if self._beam else len(self._seeds)
            lengths = Lengths(self._min_tokens, self._max_tokens, self._ending_token_ids)
            self.outputs = check_received(fields, bounds, self.resumption, num_results, lengths, self._params)
        fields.raise_violations()
        bounds.check_capacity(len(self.token_ids or fields.get("token_ids.ids") or ()), 1)
        self.text: str | None = fields.get("text")

    def complete(
        self, prompt_token_ids: list[int], bounds: ModelBounds, tenant: str = DEFAULT_TENANT, *, request_id: int,
        deadline_s: float | None, grammar: str = "",
    ) -> Request:  # fmt: skip
        """Returns the core's request. `bounds` may have changed since the request was checked; `grammar` is compiled.

        Raises InvalidRequest for a prompt that has no token or one that the model lacks (a tokenizer can have more
        tokens than the model), and for a grammar that a new executor cannot follow; CapacityExceeded if prompt and
        output can never fit.
        """
        if not prompt_token_ids:
            raise InvalidRequest({"prompt": "has no tokens"})
        if (largest := largest_id(prompt_token_ids)) >= bounds.vocab_size:
            raise InvalidRequest({"prompt": f"has the token {largest}, which the model lacks"})
        if grammar and not bounds.has_grammars:
            raise InvalidRequest({GROUP: NO_GRAMMARS})
        num_prompt_tokens = len(prompt_token_ids)
        num_output_tokens = max(1, self._max_tokens or 0, self._min_tokens)
        bounds.check_capacity(num_prompt_tokens, num_output_tokens)
        max_total_tokens = bounds.max_tokens_per_sequence
        if self._max_tokens is not None:
            max_total_tokens = num_prompt_tokens + self._max_tokens
        elif (default := self._defaults.max_tokens) is not None:
            max_total_tokens = min(max_total_tokens, num_prompt_tokens + max(default, self._min_tokens))
        return Request(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            params=replace(
                self._params,
                max_total_tokens=max_total_tokens,
                min_total_tokens=num_prompt_tokens + self._min_tokens if self._min_tokens else 0,
                seed=self._seeds[0],
                grammar=grammar,
            ),
            seeds=self._seeds,
            priority=self._priority,
            cache_salt=tenant_salt(tenant, self._cache_salt),
            deadline_s=deadline_s,
            beam=self._beam,
            is_open_ended=self._max_tokens is None,
            tenant=tenant,
        )

    @property
    def keeps_first_space(self) -> bool:
        """True unless tokenizers write a space before the output that is not meant, as before an answer in a chat."""
        return self.chat is None or self.chat.continues_last or self.grammar is not None  # a grammar allowed the space

    def stream_settings(self, request: Request, special_token_ids: frozenset[int]) -> StreamSettings:
        """Returns what the response stream of the completed request needs."""
        return StreamSettings(
            client_request_id=self._client_request_id or f"quire-{request.request_id}",
            num_prompt_tokens=len(request.prompt_token_ids),
            num_sequences=request.num_results,
            ending_token_ids=self._ending_token_ids,
            stop=self._stop,
            include_stop=self._include_stop,
            nameless_token_ids=special_token_ids if self.shows_special_tokens else frozenset(),
            min_tokens=self._min_tokens,
            num_logprobs=request.params.num_logprobs,
            num_prompt_logprobs=request.params.num_prompt_logprobs,
            follows_grammar=self.grammar is not None,
        )

    # --- the checks, in the order in which violations are reported ---------------------------------------------------

    def _check_prompt(self) -> list[int] | None:
        """Returns the prompt's token ids, if the request has any."""
        fields = self._fields
        given = [path.partition(".")[0] for path in ("text", "token_ids.ids", "chat.messages") if path in fields]
        if len(given) != 1:
            problem = f"must be one of text, token_ids and chat, not {' and '.join(given) or 'none'}"
            fields.add_violation("prompt", problem)
        fields.text("text", self._limits.max_prompt_bytes)
        if "chat.messages" in fields and not self._bounds.has_chat_template:
            fields.add_violation("chat", "this model has no chat template")
        self.chat = read_chat(fields, self._limits) if "chat.messages" in fields else None
        if "token_ids.ids" not in fields:
            return None
        num_token_ids = len(fields.items("token_ids.ids"))
        if not num_token_ids:
            fields.add_violation("token_ids.ids", "must not be empty")
        if num_token_ids >= self._bounds.max_tokens_per_sequence:
            return None  # refused for its length, so the ids need no checks
        return fields.token_ids("token_ids.ids", self._bounds.vocab_size)

    def _check_request_id(self) -> str:
        request_id = self._fields.text("request_id", self._limits.max_request_id_bytes)
        if not request_id.isprintable():  # it is written to logs
            self._fields.add_violation("request_id", "must be printable")
        return request_id

    def _check_stopping(self) -> None:
        fields, limits, vocab_size = self._fields, self._limits, self._bounds.vocab_size
        self._min_tokens = fields.integer("stopping.min_tokens", 0, MAX_UINT32, 0)
        self._max_tokens = fields.integer("stopping.max_tokens", 1, MAX_UINT32, None)
        if self._max_tokens is not None and self._min_tokens > self._max_tokens:
            problem = f"must be at most max_tokens ({self._max_tokens}), not {self._min_tokens}"
            fields.add_violation("stopping.min_tokens", problem)
        self._stop = _unique(fields.stop_strings("stopping.stop", limits.max_num_stop, limits.max_stop_bytes))
        stop_token_ids = fields.token_ids("stopping.stop_token_ids", vocab_size, limits.max_num_stop_token_ids)
        self._stop_token_ids = _unique(stop_token_ids)
        ignore_eos = fields.flag("stopping.ignore_eos")
        eos_token_ids = tuple(i for i in self._defaults.eos_token_ids if i < vocab_size)
        self._eos_token_ids = () if ignore_eos else eos_token_ids
        self._include_stop = fields.flag("stopping.include_stop")
        self._ending_token_ids = frozenset(self._eos_token_ids + self._stop_token_ids)

    def _check_beam_width(self) -> int:
        """Returns the width, or 0 without a beam search."""
        maximum = min(self._limits.max_beam_width, self._bounds.max_num_seqs)
        width = self._fields.integer("sampling.beam_width", 0, maximum, 0)
        if width:
            self._check_beam_conflicts(width)
        return width

    def _check_beam_conflicts(self, width: int) -> None:
        """Adds violations for fields that cannot be combined with a beam search."""
        fields, reason = self._fields, "with beam_width: a beam search draws no random numbers"
        if fields.get("sampling.temperature") not in (None, 0):
            fields.add_violation("sampling.temperature", f"must be absent or 0 {reason}")
        random_params = [param.name for param in SAMPLING_PARAMS if param.in_beam_search is not None]
        for name in (*random_params, "seed"):
            if name != "temperature" and f"sampling.{name}" in fields:
                fields.add_violation(f"sampling.{name}", f"must be absent {reason}")
        num_returned = fields.get("sampling.n")
        if type(num_returned) is int and num_returned > width:
            fields.add_violation("sampling.n", f"must be at most beam_width ({width}), not {num_returned}")
        if self._stop:
            fields.add_violation("stopping.stop", "must be empty with beam_width; stop_token_ids may be used")
        for path in ("output.logprobs", "output.prompt_logprobs"):
            if path in fields:
                fields.add_violation(path, "must be absent with beam_width")

    def _check_params(self, *, is_beam: bool) -> SequenceParams:
        """Returns the parameters without the seed and the bounds of length, which need the prompt."""
        limits = self._limits
        numbers = self._check_sampling_numbers(is_beam=is_beam)
        biases = self._fields.token_biases(
            "sampling.logit_bias", self._bounds.vocab_size, limits.max_num_logit_bias, limits.max_logit_bias
        )
        return SequenceParams(
            max_total_tokens=0,
            eos_token_ids=self._eos_token_ids,
            stop_token_ids=self._stop_token_ids,
            allowed_token_ids=self._check_allowed_token_ids(),
            bias_token_ids=tuple(biases),
            bias_values=tuple(biases.values()),
            num_logprobs=self._check_num_logprobs("output.logprobs"),
            num_prompt_logprobs=self._check_num_logprobs("output.prompt_logprobs"),
            **numbers,
        )

    def _check_sampling_numbers(self, *, is_beam: bool) -> dict[str, Any]:
        """Returns the numbers of SAMPLING_PARAMS by name. A beam search ignores the checkpoint's random ones."""
        fields = self._fields
        numbers: dict[str, Any] = {}
        for param in SAMPLING_PARAMS:
            path, default = f"sampling.{param.name}", self._defaults.value_of(param)
            if param.is_integer:
                number: float = fields.integer(path, int(param.minimum), int(param.maximum), int(default))
            else:
                number = fields.number(
                    path, param.minimum, param.maximum, default, exclude_minimum=param.exclude_minimum
                )
            numbers[param.name] = param.in_beam_search if is_beam and param.in_beam_search is not None else number
        if numbers["temperature"] < MIN_TEMPERATURE:
            numbers["temperature"] = 0.0
        if numbers["top_k"] >= self._bounds.vocab_size:
            numbers["top_k"] = 0
        return numbers

    def _check_num_logprobs(self, path: str) -> int:
        """Returns the number of log-probabilities for each token, its own included; 0 if none are requested."""
        num_top = self._fields.integer(path, 0, min(self._limits.max_num_logprobs, self._bounds.vocab_size), None)
        return 0 if num_top is None else num_top + 1

    def _check_allowed_token_ids(self) -> tuple[int, ...]:
        path, vocab_size = "sampling.allowed_token_ids", self._bounds.vocab_size
        allowed = self._fields.token_ids(path, vocab_size, self._limits.max_num_allowed_token_ids)
        # If every allowed token ends the text and none may end it yet, no token is left to sample.
        if self._min_tokens and self._ending_token_ids.issuperset(allowed or range(vocab_size)):
            problem = "must have a token that does not end the text, since min_tokens wants some"
            self._fields.add_violation(path, problem)
        return _unique(allowed)

    def _check_beam(self, width: int) -> BeamParams | None:
        fields, maximum = self._fields, self._limits.max_length_penalty
        length_penalty = fields.number("sampling.length_penalty", -maximum, maximum, 1.0)
        early_stopping = fields.flag("sampling.early_stopping")
        if width == 0:
            for path in ("sampling.length_penalty", "sampling.early_stopping"):
                if path in fields and fields.get("sampling.beam_width") in (None, 0):
                    fields.add_violation(path, "must be absent without beam_width")
            return None
        num_candidates = max(2, 1 + len(self._ending_token_ids)) * width
        num_choices = len(self._params.allowed_token_ids) or self._bounds.vocab_size
        if num_candidates > num_choices:
            problem = f"needs {num_candidates} different tokens to choose from, and there are {num_choices}"
            fields.add_violation("sampling.beam_width", problem)
        num_returned = fields.get("sampling.n")
        return BeamParams(width, num_returned if type(num_returned) is int else 1, length_penalty, early_stopping)

    def _check_seeds(self, drawn_seed: int) -> tuple[int, ...]:
        """Returns a seed for each sequence; (0,) for a beam search."""
        seed = self._fields.integer("sampling.seed", 0, MASK_64, drawn_seed)
        maximum = self._bounds.max_num_seqs
        num_sequences = self._fields.integer("sampling.n", 1, maximum, min(maximum, self._defaults.num_samples))
        if self._beam is not None:
            return (0,)
        return tuple(sample_seed(seed, index) for index in range(num_sequences))


def _unique(values: Iterable[T]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(values))
