"""Turns the fields of a client's request into a stream of its output, for every protocol that the server speaks.

    RequestFields → check → tokenise, or render and tokenise → complete → Engine.submit → ResponseStream

Each server adds its own wire format, and leaves the `with` block when its client disconnects.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sized
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from scheduler.core import Request, Unavailable
from scheduler.engine.engine import ServerState
from scheduler.requests.completion import Completion
from scheduler.requests.leaving import code_of_leaving, reason_of_leaving
from scheduler.requests.limits import ModelBounds, RequestLimits
from scheduler.requests.open_grammars import GrammarHolder, OpenGrammars
from scheduler.requests.open_streams import OpenStreams
from scheduler.requests.replay import Replay, Replays, ResumedBeams
from scheduler.requests.request_fields import claimed_bound_and_priority
from scheduler.requests.response_stream import ResponseStream
from scheduler.requests.resumption import (
    CONTINUATION,
    SEQUENCES,
    check_model,
    continuation_of,
    model_digest,
    num_resumed_ids,
)
from scheduler.requests.status import code_of
from scheduler.requests.validation import RequestChecker
from scheduler.requests.write_queue import WriteQueue
from scheduler.telemetry.request_observer import Caller, ObservedRequest, RequestFacts, RequestObserver, Tracer
from scheduler.tenants.rate_limits import RateLimits
from scheduler.tenants.settings import Tenants
from scheduler.text.chat_messages import MESSAGE_CHARACTERS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from scheduler.engine.dispatcher import Sink
    from scheduler.engine.engine import Engine
    from scheduler.requests.generation_defaults import GenerationDefaults
    from scheduler.requests.request_fields import RequestFields
    from scheduler.requests.stream_settings import StreamSettings
    from scheduler.telemetry.metrics import SchedulerMetrics
    from scheduler.telemetry.request_metrics import RequestMetrics
    from scheduler.text.chat import ChatRenderer
    from scheduler.text.grammars import GrammarCompiler
    from scheduler.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The parts of a checkpoint that requests need. `chat` is None if it has no chat template."""

    tokenizer: Tokenizer
    chat: ChatRenderer | None
    defaults: GenerationDefaults
    grammars: GrammarCompiler | None = None


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A valid request, and the beginning of its stream. `resumed` is None unless it continues another stream."""

    request: Request
    settings: StreamSettings
    completions: list[Completion]
    resumed: Replay | None = None


class Intake:
    """Admits the requests of all servers.

    `OpenStreams` limits the streams that are open at once. The engine limits waiting and running requests; this limit
    also covers finished ones, which are kept as long as a slow client reads them.
    """

    def __init__(
        self,
        engine: Engine,
        model: ServedModel,
        metrics: SchedulerMetrics,
        limits: RequestLimits | None = None,
        *,
        max_streams: int = 8192,
        tracer: Tracer | None = None,
        tenants: Tenants | None = None,
    ) -> None:
        self._engine = engine
        self.model = model
        self._observer = RequestObserver(metrics, tracer)
        self._limits = limits or RequestLimits()
        self._tenants = tenants or Tenants()
        self._rates = RateLimits(self._tenants)
        self.open_streams = OpenStreams(max_streams)
        self._write_queue = WriteQueue()
        self._replays = Replays()
        self._grammars = OpenGrammars(model.grammars, metrics)
        self._client_request_ids: dict[int, str] = {}

    @asynccontextmanager
    async def open(
        self, fields: RequestFields, caller: Caller, deadline_s: float | None
    ) -> AsyncIterator[ResponseStream]:
        """Yields the stream of an admitted request; leaving the block cancels the request if it has not ended.

        `deadline_s` is a reading of time.monotonic(). Raises InvalidRequest, CapacityExceeded, QueueFull, Unavailable.
        """
        observed = self._observed(fields, caller)
        with self.open_streams.opened(caller.tenant, observed), self._grammars.held(caller.tenant) as holder:
            request, stream, request_metrics = await self._admit(fields, holder, deadline_s, observed)
            with ExitStack() as ending:  # from the last to the first, even if one of them fails
                ending.callback(lambda: request_metrics.ended(reason_of_leaving(deadline_s, observed.arrival_s)))
                ending.callback(lambda: self._rates.add_tokens(caller.tenant, request_metrics.num_tokens))
                ending.callback(stream.close)
                ending.callback(self._engine.cancel, request.request_id)
                ending.callback(self._client_request_ids.pop, request.request_id)
                observed.queued(request_metrics)
                yield stream

    def refused(self, fields: RequestFields, caller: Caller, error: Exception) -> None:
        """Counts and logs a request that its server could not read; `fields` holds the fields that could be read."""
        self._observed(fields, caller).refused(code_of(error).name.lower())

    async def tokenize(self, fields: RequestFields, tenant: str, adds_special_tokens: bool) -> list[int]:
        """Returns the ids of a prompt: the fields "text" or "chat…" of a request. Raises the errors of `open`."""
        self._rates.take_request(tenant)
        checker = RequestChecker(fields, self._limits, self._bounds(tenant), self.model.defaults, drawn_seed=0)
        return await self._prompt_token_ids(checker, tenant, adds_special_tokens)

    async def detokenize(self, fields: RequestFields, tenant: str) -> str:
        """Returns the text of the ids in the field "token_ids". Raises the errors of `open`."""
        self._rates.take_request(tenant)
        bounds, num_ids = self._bounds(tenant), len(fields.items("token_ids"))
        bounds.check_capacity(num_ids, 0)
        check = partial(fields.token_ids, "token_ids", bounds.vocab_size)
        token_ids = await self.model.tokenizer.in_turn(check, num_ids, tenant)
        fields.raise_violations()
        return await self.model.tokenizer.decode(token_ids, tenant=tenant)

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a prompt and its output."""
        return self._engine.description.max_model_len

    @property
    def has_chat_template(self) -> bool:
        """True if a prompt may be a chat."""
        return self.model.chat is not None

    def client_request_id(self, request_id: int) -> str:
        """Returns the client's id of an open request, or the engine's id if the request is not open."""
        return self._client_request_ids.get(request_id, str(request_id))

    def _submit(self, request: Request, sink: Sink, *, is_resumed: bool) -> None:
        """Gives the prompt's tokens back to the tenant's rate if the request is refused.

        A resumed one is not refused for its wait: it was accepted once, and the first steps of a new process, which can
        be slow, are all that predictions know then.
        """
        try:
            if not is_resumed:
                self._engine.check_deadline(request.tenant, request.deadline_s, request.max_tokens, request.priority)
            self._engine.submit(request, sink)
        except Exception:
            self._rates.add_tokens(request.tenant, -request.num_given_tokens)
            raise

    def _observed(self, fields: RequestFields, caller: Caller) -> ObservedRequest:
        return self._observer.arrived(caller, request_id=fields.get("request_id"), is_chat="chat.messages" in fields)

    async def _admit(
        self, fields: RequestFields, holder: GrammarHolder, deadline_s: float | None, observed: ObservedRequest
    ) -> tuple[Request, ResponseStream, RequestMetrics]:
        tenant = holder.tenant
        try:
            if SEQUENCES not in fields:
                self._engine.check_deadline(tenant, deadline_s, *claimed_bound_and_priority(fields))
            with self._rates.request(tenant):
                checked = await self._check(fields, holder, deadline_s)
                request, settings, resumed = checked.request, checked.settings, checked.resumed
                self._rates.take_tokens(tenant, request.num_given_tokens)
                request_metrics = observed.admitted(self._facts(checked))
                stop = partial(self._engine.stop, request.request_id)
                stream = ResponseStream(settings, checked.completions, stop, request_metrics, self._write_queue)
                if resumed is None or resumed.has_rest:
                    sink = ResumedBeams(stream, resumed.outputs) if resumed and request.beam else stream
                    self._submit(request, sink, is_resumed=resumed is not None)
            if resumed is not None:
                self._observer.metrics.resumed()
                if request.outputs or not resumed.has_rest:
                    stream.begin_resumed()
        except asyncio.CancelledError:
            observed.refused(code_of_leaving(deadline_s, observed.arrival_s))
            raise
        except Exception as error:
            observed.refused(code_of(error).name.lower())
            raise
        self._client_request_ids[request.request_id] = settings.client_request_id
        return request, stream, request_metrics

    async def _check(self, fields: RequestFields, holder: GrammarHolder, deadline_s: float | None) -> CheckedRequest:
        tenant = holder.tenant
        settings = self._tenants.settings_of(tenant)
        defaults = replace(self.model.defaults, max_tokens=settings.default_max_tokens, num_samples=settings.default_n)
        # Clients see the seeds of their own requests, and must not be able to compute those of others.
        check = partial(RequestChecker, fields, self._limits, self._bounds(tenant), defaults, secrets.randbits(64))
        token_ids = fields.get("token_ids.ids")
        size = _length(token_ids) + num_resumed_ids(fields) + MESSAGE_CHARACTERS * _length(fields.get("chat.messages"))
        checker = await self.model.tokenizer.in_turn(check, size, tenant)
        grammar = ""
        if checker.grammar is not None:
            grammar = await self._grammars.compiled(checker.grammar, self._bounds(tenant).vocab_size, holder)
        prompt_token_ids = await self._prompt_token_ids(checker, tenant)
        request_id = self._engine.new_request_id()

        def complete() -> Request:
            # The bounds are read each time: an executor with a smaller pool or other weights may have come meanwhile.
            bounds = self._bounds(tenant)
            if checker.resumption is not None:
                check_model(fields.get(CONTINUATION), bounds)
            return checker.complete(
                prompt_token_ids, bounds, tenant, request_id=request_id, deadline_s=deadline_s, grammar=grammar
            )

        request = complete()
        stream_settings = checker.stream_settings(request, self.model.tokenizer.special_token_ids)
        if checker.is_resumable or checker.resumption is not None:
            new_continuation = partial(continuation_of, self._engine, request)
            stream_settings = replace(stream_settings, new_continuation=new_continuation)
        if checker.has_token_bytes:
            stream_settings = replace(stream_settings, token_bytes=self.model.tokenizer.token_bytes)
        new_detokenizer = partial(
            self.model.tokenizer.detokenizer,
            continues_text=checker.keeps_first_space,
            shows_special_tokens=checker.shows_special_tokens,
        )
        if checker.resumption is None:
            indices = range(stream_settings.num_sequences)
            completions = [Completion(index, stream_settings, new_detokenizer()) for index in indices]
            return CheckedRequest(request, stream_settings, completions)
        stream_settings = replace(stream_settings, num_cached_tokens=checker.resumption.num_cached_tokens)
        resumed = await self._replays.replay(tenant, checker.outputs, stream_settings, new_detokenizer)
        request = resumed.rest_of(complete(), fields.get("resume.num_prompt_logprobs"))
        return CheckedRequest(request, stream_settings, resumed.completions, resumed)

    def _bounds(self, tenant: str) -> ModelBounds:
        if self._engine.state is ServerState.DRAINING:
            raise Unavailable("the server is draining")  # raised here, before the request is tokenised
        return ModelBounds(
            vocab_size=self._engine.description.vocab_size,
            max_num_seqs=min(self._engine.description.max_num_seqs, self._tenants.max_num_seqs_of(tenant)),
            max_tokens_per_sequence=self._engine.max_prompt_and_output,
            has_chat_template=self.model.chat is not None,
            max_model_len=self._engine.description.max_model_len,
            model_digest=model_digest(self._engine.description),
            has_grammars=self._engine.description.has_grammars and self.model.grammars is not None,
        )

    async def _prompt_token_ids(
        self, checker: RequestChecker, tenant: str, adds_special_tokens: bool = True
    ) -> list[int]:
        tokenizer = self.model.tokenizer
        max_tokens = self._engine.max_prompt_and_output - 1  # at least one is generated
        if checker.token_ids is not None:
            return checker.token_ids
        if checker.chat is not None and self.model.chat is not None:
            # The template writes the special tokens itself.
            rendered = await self.model.chat.render(checker.chat, tenant=tenant)
            return await tokenizer.encode_chat(rendered, max_tokens=max_tokens, tenant=tenant)
        return await tokenizer.encode(
            checker.text or "", max_tokens=max_tokens, tenant=tenant, add_special_tokens=adds_special_tokens
        )

    def _facts(self, checked: CheckedRequest) -> RequestFacts:
        request, settings, resumed = checked.request, checked.settings, checked.resumed
        params = request.params
        return RequestFacts(
            request_id=settings.client_request_id,
            engine_id=request.request_id,
            model_name=self._engine.description.model_name,
            num_prompt_tokens=settings.num_prompt_tokens,
            num_results=settings.num_sequences if resumed is None else resumed.num_unreported,
            max_tokens=None if request.is_open_ended else params.max_total_tokens - settings.num_prompt_tokens,
            params=params,
            is_resumed=resumed is not None,
        )


def _length(value: object) -> int:
    """Returns the length of a list of a client's; 0 if it is absent or no list."""
    return len(value) if isinstance(value, Sized) else 0
