"""`quire.v1.Generation` on grpc.aio."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from quire.tls import peer_names
from quire.v1 import generation_pb2 as pb
from quire.v1.generation_pb2_grpc import GenerationServicer
from quire.version import build_version
from scheduler.core import QuireError
from scheduler.core.inspect.views import num_waiting_prompt_tokens
from scheduler.engine.engine import ServerState
from scheduler.identity.identity import CALLER
from scheduler.identity.permissions import METHODS
from scheduler.requests.request_fields import RequestFields
from scheduler.requests.status import abort, or_abort
from scheduler.requests.structured_output import GROUP, KINDS
from scheduler.requests.write_timeout import deliver
from scheduler.servers.access import Access, authorization_in
from scheduler.servers.arrivals import ROUTER, Arrivals
from scheduler.servers.loop_share import LoopShare
from scheduler.servers.many_streams import MAX_STREAMS, ManyStreams
from scheduler.servers.stream_opener import StreamOpener
from scheduler.telemetry.request_observer import Caller

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from typing import Any

    import grpc
    from google.protobuf.message import Message

    from scheduler.core import Scheduler
    from scheduler.engine.engine import Engine
    from scheduler.requests.intake import Intake

    Context = grpc.aio.ServicerContext[Any, Any]

_SIZES = METHODS["/quire.v1.Admin/GetStepTrace"]
"""Roles that may know the sizes of all requests."""

_WATCHES = METHODS["/quire.v1.Replica/Watch"]
"""Roles of routers."""

SERVER_STATES = {
    ServerState.WAITING_FOR_EXECUTOR: pb.SERVER_STATE_WAITING_FOR_EXECUTOR,
    ServerState.SERVING: pb.SERVER_STATE_SERVING,
    ServerState.DRAINING: pb.SERVER_STATE_DRAINING,
}


class GenerationServer(GenerationServicer):
    """Serves one request per call of Generate, and many per call of GenerateMany. When a call ends, so do its requests.

    stalled_reader_timeout_s   time after which a client that accepts no message loses its stream
    access                     verifies the clients that the requests of GenerateMany name
    """

    def __init__(
        self,
        engine: Engine,
        intake: Intake,
        policy_name: str,
        stalled_reader_timeout_s: float = 120.0,
        access: Access | None = None,
    ) -> None:
        self._engine = engine
        self._intake = intake
        self._policy_name = policy_name
        self.stalled_reader_timeout_s = stalled_reader_timeout_s
        self._access = access or Access()
        self._calls_of_many: set[ManyStreams] = set()
        self._share = LoopShare()
        self.arrivals = Arrivals()

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """Maps errors to statuses (`scheduler.requests.status`); cancellation passes through to gRPC."""
        await or_abort(self._generate(request, context), context)

    async def _generate(self, request: pb.GenerateRequest, context: Context) -> None:
        async with self._intake.open(read_fields(request), _caller(context), _deadline_s(context)) as stream:
            await deliver(stream, context.write, self.stalled_reader_timeout_s)

    async def GenerateMany(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[pb.GenerateManyRequest], context: Context
    ) -> None:
        """A request that fails ends its stream; the call fails if its client breaks the protocol or reads nothing."""
        metadata = dict(context.invocation_metadata() or ())
        authorization = authorization_in(context.invocation_metadata()) or None
        # Only those that may watch hear the number. Others could raise that of a router.
        counted = self.arrivals.counter(metadata.get(ROUTER) if CALLER.get().may(_WATCHES) else None)
        names = peer_names(context.auth_context())
        opener = StreamOpener(
            self._intake, self._access, read_fields, CALLER.get(), context.peer(), counted, authorization, names
        )
        streams = ManyStreams(opener, self._share, self.stalled_reader_timeout_s, MAX_STREAMS)
        self._calls_of_many.add(streams)
        try:
            await or_abort(streams.serve(request_iterator, context.write), context, "call")
        finally:
            self._calls_of_many.discard(streams)

    def stop(self) -> None:
        """Has the calls of GenerateMany end when their streams have ended."""
        for streams in self._calls_of_many:
            streams.stop()

    async def GetServerInfo(  # noqa: N802
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        """Fails with UNAVAILABLE until an executor has described the model."""
        try:
            model = self._engine.description
        except QuireError as error:
            await abort(context, error)
        core = self._engine.core
        running = () if core is None else core.state.batch.running
        num_running = len({sequence.request.request_id for sequence in running})
        # Sizes would tell a tenant what others send, and what of that is cached.
        caller = CALLER.get(None)
        sizes = core if caller is not None and caller.may(_SIZES) else None
        return pb.GetServerInfoResponse(
            version=build_version(),
            model_name=model.model_name,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            block_size=model.block_size,
            num_blocks=model.num_blocks,
            max_num_seqs=model.max_num_seqs,
            max_num_batched_tokens=model.max_num_batched_tokens,
            policy=self._policy_name,
            state=SERVER_STATES[self._engine.state],
            dtype=model.dtype,
            num_waiting=0 if core is None else core.num_unfinished_requests - num_running,
            num_running=num_running,
            num_waiting_prompt_tokens=0 if sizes is None else num_waiting_prompt_tokens(sizes),
            oldest_waiting_s=0.0 if sizes is None else self._engine.oldest_waiting_s,
            num_computed_prompt_tokens=0 if sizes is None else _num_computed_prompt_tokens(sizes),
        )


def _num_computed_prompt_tokens(core: Scheduler) -> int:
    counters = core.state.counters
    return counters.num_prefix_queried_tokens - counters.num_prefix_hit_tokens


def read_fields(request: Message) -> RequestFields:
    """Returns the fields that are present. Long fields are not copied, because their size was not checked yet."""
    values: dict[str, Any] = {}
    for field, value in request.ListFields():
        if field.message_type is None:
            values[field.name] = value
            continue
        if field.name == GROUP:
            values |= _structured_output(value)
            continue
        for part in field.message_type.fields:
            if not part.has_presence or value.HasField(part.name):
                values[f"{field.name}.{part.name}"] = getattr(value, part.name)
    return RequestFields(values)


def _structured_output(message: pb.StructuredOutput) -> dict[str, Any]:
    """Returns the fields of a grammar. The group itself is one of them: its kind may be one of a newer release."""
    kind = message.WhichOneof("grammar")
    values: dict[str, Any] = {GROUP: True}
    if kind is not None:
        values[KINDS[kind]] = message.choice.texts if kind == "choice" else getattr(message, kind)
    return values


def _caller(context: Context) -> Caller:
    metadata: dict[str, Any] = dict(context.invocation_metadata() or ())
    return Caller(context.peer(), metadata.get("traceparent"), metadata.get("tracestate"), CALLER.get().tenant)


def _deadline_s(context: Context) -> float | None:
    """Returns the client's deadline on time.monotonic(), which is the engine's clock."""
    remaining_s: float | None = context.time_remaining()
    return None if remaining_s is None else time.monotonic() + remaining_s
