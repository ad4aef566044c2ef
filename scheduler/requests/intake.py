"""From a checked client request to a stream of its output: what every door does, whatever protocol it speaks.

    incoming → check → tokenise, or render and tokenise → complete → Engine.submit → ResponseStream

What a door adds is its own wire format and how it says that its client has gone: it leaves the `with`.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from scheduler.core import FinishReason, QueueFull, Request, Unavailable
from scheduler.engine.engine import ServerState
from scheduler.requests.response_stream import ResponseStream, StreamSettings
from scheduler.requests.status import code_of
from scheduler.requests.validation import CheckedRequest, ModelBounds, RequestLimits, check, complete
from scheduler.requests.write_queue import Turnstile
from scheduler.telemetry.request_observer import ObservedRequest, RequestFacts, RequestObserver, Tracer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from scheduler.engine.engine import Engine
    from scheduler.requests.generation_defaults import GenerationDefaults
    from scheduler.requests.incoming import IncomingRequest
    from scheduler.telemetry.metrics import SchedulerMetrics
    from scheduler.telemetry.request_metrics import RequestMetrics
    from scheduler.text.chat import ChatRenderer
    from scheduler.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the checkpoint gives to requests. `chat` is None where it has no chat template."""

    tokenizer: Tokenizer
    chat: ChatRenderer | None
    defaults: GenerationDefaults


class Intake:
    """Takes requests in, for all doors together.

    At most `max_streams` are open at once. The engine bounds what waits and what runs; this bounds what has finished,
    and is kept only because its reader is slow.
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
    ) -> None:
        self._engine = engine
        self._model = model
        self._observer = RequestObserver(metrics, tracer)
        self._limits = limits or RequestLimits()
        self._max_streams = max_streams
        self._num_streams = 0
        self._turnstile = Turnstile()
        self._client_request_ids: dict[int, str] = {}

    @asynccontextmanager
    async def open(self, incoming: IncomingRequest, deadline_s: float | None) -> AsyncIterator[ResponseStream]:
        """A stream of an admitted request; leaving the block cancels what has not ended.

        `deadline_s` is a reading of time.monotonic(). Raises InvalidRequest, CapacityExceeded, QueueFull, Unavailable.
        """
        observed = self._observer.arrived(incoming)
        if self._num_streams >= self._max_streams:
            observed.refused(code_of(QueueFull("")).name.lower())
            raise QueueFull(f"{self._max_streams} streams are open")
        self._num_streams += 1
        try:
            request, stream, request_metrics = await self._admit(incoming, deadline_s, observed)
            try:
                yield stream
            finally:
                self._engine.cancel(request.request_id)
                stream.close()
                request_metrics.ended(FinishReason.CANCELLED)  # unless it has ended otherwise
                del self._client_request_ids[request.request_id]
        finally:
            self._num_streams -= 1

    def refused(self, incoming: IncomingRequest, error: Exception) -> None:
        """Counts and logs a request that its door could not read; `incoming` is what is known of it all the same."""
        self._observer.arrived(incoming).refused(code_of(error).name.lower())

    @property
    def has_chat_template(self) -> bool:
        """Whether a prompt may be a chat."""
        return self._model.chat is not None

    def client_request_id(self, request_id: int) -> str:
        """As its client knows it; of a request that is not open any more, the engine's own."""
        return self._client_request_ids.get(request_id, str(request_id))

    async def _admit(
        self, incoming: IncomingRequest, deadline_s: float | None, observed: ObservedRequest
    ) -> tuple[Request, ResponseStream, RequestMetrics]:
        try:
            checked, request = await self._resolve(incoming, deadline_s)
            request_metrics = observed.admitted(self._facts(checked, request))
            stream = self._stream(checked, request, request_metrics)
            self._engine.submit(request, stream)
            observed.queued(request_metrics)
        except asyncio.CancelledError:
            observed.refused("cancelled")
            raise
        except Exception as error:
            observed.refused(code_of(error).name.lower())
            raise
        self._client_request_ids[request.request_id] = _client_request_id(checked, request)
        return request, stream, request_metrics

    async def _resolve(self, incoming: IncomingRequest, deadline_s: float | None) -> tuple[CheckedRequest, Request]:
        checked = check(incoming, self._limits, self._bounds(), self._model.defaults, random.getrandbits(64))
        prompt_token_ids = await self._prompt_token_ids(checked)
        # Asked again: while the text was tokenised, a smaller pool may have come.
        bounds = self._bounds()
        request_id = self._engine.new_request_id()
        return checked, complete(checked, prompt_token_ids, bounds, request_id=request_id, deadline_s=deadline_s)

    def _bounds(self) -> ModelBounds:
        if self._engine.state is ServerState.DRAINING:
            raise Unavailable("the server is draining")  # before any work is put into it
        return ModelBounds(
            vocab_size=self._engine.description.vocab_size,
            max_num_seqs=self._engine.description.max_num_seqs,
            max_tokens_per_sequence=self._engine.max_prompt_and_output,
            has_chat_template=self._model.chat is not None,
        )

    async def _prompt_token_ids(self, checked: CheckedRequest) -> list[int]:
        tokenizer = self._model.tokenizer
        if checked.token_ids is not None:
            return checked.token_ids
        if checked.chat is not None and self._model.chat is not None:
            # The template writes the special tokens itself.
            return await tokenizer.encode(await self._model.chat.render(checked.chat), add_special_tokens=False)
        return await tokenizer.encode(checked.text or "")

    def _facts(self, checked: CheckedRequest, request: Request) -> RequestFacts:
        return RequestFacts(
            request_id=_client_request_id(checked, request),
            engine_id=request.request_id,
            model_name=self._engine.description.model_name,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_results=_num_results(request),
            max_tokens=checked.max_tokens,
            params=request.params,
        )

    def _stream(self, checked: CheckedRequest, request: Request, request_metrics: RequestMetrics) -> ResponseStream:
        settings = StreamSettings(
            client_request_id=_client_request_id(checked, request),
            num_prompt_tokens=len(request.prompt_token_ids),
            num_sequences=_num_results(request),
            ending_token_ids=frozenset(request.params.eos_token_ids + request.params.stop_token_ids),
            stop=checked.stop,
            include_stop=checked.include_stop,
            min_tokens=checked.min_tokens,
            num_logprobs=request.params.num_logprobs,
            num_prompt_logprobs=request.params.num_prompt_logprobs,
        )
        # An answer in a chat is a text of its own; any other output goes on where its prompt ended.
        new_detokenizer = partial(self._model.tokenizer.detokenizer, continues_text=checked.chat is None)
        stop_sequence = partial(self._engine.stop, request.request_id)
        return ResponseStream(settings, new_detokenizer, stop_sequence, request_metrics, self._turnstile)


def _client_request_id(checked: CheckedRequest, request: Request) -> str:
    return checked.client_request_id or f"quire-{request.request_id}"


def _num_results(request: Request) -> int:
    """Sequences that the client gets."""
    return request.num_sequences if request.beam is None else request.beam.num_returned
