"""`quire.v1.Generation` on grpc.aio."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from quire.v1.generation_pb2_grpc import GenerationServicer
from scheduler.core import QuireError
from scheduler.requests.incoming import IncomingRequest, Output, Sampling, Stopping
from scheduler.requests.status import abort
from scheduler.requests.write_timeout import deliver

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    import grpc

    from quire.v1 import generation_pb2 as wire
    from scheduler.requests.intake import Intake

    Context = grpc.aio.ServicerContext[Any, Any]

log = logging.getLogger(__name__)

NO_METADATA: Mapping[str, Any] = {}


class GenerationServer(GenerationServicer):
    """One call is one request; when the call ends, for whatever reason, so does the request.

    stalled_reader_timeout_s   a client that takes no message for so long loses its stream
    """

    def __init__(self, intake: Intake, stalled_reader_timeout_s: float = 120.0) -> None:
        self._intake = intake
        self._stalled_reader_timeout_s = stalled_reader_timeout_s

    async def Generate(self, request: wire.GenerateRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """Maps every error to a status (`scheduler.requests.status`); cancellation passes through to gRPC."""
        try:
            incoming = read_request(request, context.peer(), _metadata(context))
            async with self._intake.open(incoming, _deadline_s(context)) as stream:
                await deliver(stream, context.write, self._stalled_reader_timeout_s)
        except QuireError as error:
            failure: Exception = error
        except Exception as error:
            log.exception("a request failed by a bug of ours")
            failure = error
        else:
            return
        await abort(context, failure)


def _deadline_s(context: Context) -> float | None:
    """The client's deadline on time.monotonic(), the engine's clock."""
    remaining_s: float | None = context.time_remaining()
    return None if remaining_s is None else time.monotonic() + remaining_s


def _metadata(context: Context) -> dict[str, Any]:
    return dict(context.invocation_metadata() or ())


def read_request(
    request: wire.GenerateRequest, client: str = "", metadata: Mapping[str, Any] = NO_METADATA
) -> IncomingRequest:
    """Protobuf to plain data: presence becomes None. Long fields are not copied: nobody has seen their size."""
    prompt = request.WhichOneof("prompt")
    return IncomingRequest(
        request_id=request.request_id,
        text=request.text if prompt == "text" else None,
        token_ids=request.token_ids.ids if prompt == "token_ids" else None,
        chat=request.chat.messages if prompt == "chat" else None,
        sampling=_read_sampling(request.sampling),
        stopping=_read_stopping(request.stopping),
        output=Output(
            logprobs=request.output.logprobs if request.output.HasField("logprobs") else None,
            prompt_logprobs=request.output.prompt_logprobs if request.output.HasField("prompt_logprobs") else None,
        ),
        priority=request.priority if request.HasField("priority") else None,
        cache_salt=request.cache_salt if request.HasField("cache_salt") else None,
        client=client,
        traceparent=metadata.get("traceparent"),
        tracestate=metadata.get("tracestate"),
    )


def _read_sampling(sampling: wire.SamplingParams) -> Sampling:
    has = sampling.HasField
    return Sampling(
        temperature=sampling.temperature if has("temperature") else None,
        top_p=sampling.top_p if has("top_p") else None,
        top_k=sampling.top_k if has("top_k") else None,
        min_p=sampling.min_p if has("min_p") else None,
        repetition_penalty=sampling.repetition_penalty if has("repetition_penalty") else None,
        frequency_penalty=sampling.frequency_penalty if has("frequency_penalty") else None,
        presence_penalty=sampling.presence_penalty if has("presence_penalty") else None,
        seed=sampling.seed if has("seed") else None,
        n=sampling.n if has("n") else None,
        beam_width=sampling.beam_width if has("beam_width") else None,
        logit_bias=sampling.logit_bias,
        allowed_token_ids=sampling.allowed_token_ids,
        length_penalty=sampling.length_penalty if has("length_penalty") else None,
        early_stopping=sampling.early_stopping if has("early_stopping") else None,
    )


def _read_stopping(stopping: wire.StoppingParams) -> Stopping:
    has = stopping.HasField
    return Stopping(
        max_tokens=stopping.max_tokens if has("max_tokens") else None,
        min_tokens=stopping.min_tokens if has("min_tokens") else None,
        stop=stopping.stop,
        stop_token_ids=stopping.stop_token_ids,
        ignore_eos=stopping.ignore_eos if has("ignore_eos") else None,
        include_stop=stopping.include_stop if has("include_stop") else None,
    )
