"""`quire.v1.Replica` on grpc.aio: what routers need to know to choose among schedulers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc

from quire.v1 import replica_pb2 as pb
from quire.v1.replica_pb2_grpc import ReplicaServicer
from scheduler.core.inspect.core_load import core_load
from scheduler.core.tenants.account import equal_terms
from scheduler.requests.write_timeout import WriteTimeout
from scheduler.servers.access import ClientRefused
from scheduler.servers.arrivals import MAX_ID_BYTES
from scheduler.servers.generation_server import SERVER_STATES
from scheduler.servers.prefix_feed import PrefixFeed, Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from scheduler.core import Scheduler
    from scheduler.core.tenants.account import TermsOf
    from scheduler.engine.engine import Engine
    from scheduler.servers.access import Access
    from scheduler.servers.arrivals import Arrivals
    from scheduler.servers.prefix_feed import Changes, PrefixSubscription

    Context = grpc.aio.ServicerContext[Any, Any]

INTERVAL_S = 0.05
MAX_WATCHES = 64
"""Routers that watch at the same time. Each costs a wake of the event loop every 50 ms."""


class ReplicaServer(ReplicaServicer):
    """Watches the core only while a router does."""

    def __init__(
        self,
        engine: Engine,
        access: Access,
        arrivals: Arrivals,
        moves_streams: Callable[[], bool] = lambda: False,
        terms_of: TermsOf = equal_terms,
        stalled_reader_timeout_s: float = 60.0,
    ) -> None:
        self._engine = engine
        self._access = access
        self._terms_of = terms_of
        self._arrivals = arrivals
        self._moves_streams = moves_streams
        self._reader_timeout_s = stalled_reader_timeout_s
        self._feed = PrefixFeed()
        self._num_watches = 0

    async def Watch(self, request: pb.WatchRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        if len(request.router_id.encode()) > MAX_ID_BYTES:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"router_id has at most {MAX_ID_BYTES} bytes")
        if self._num_watches >= MAX_WATCHES:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_WATCHES} routers watch already")
        self._num_watches += 1
        subscription = self._feed.subscribe()
        try:
            with WriteTimeout(self._reader_timeout_s) as writing, self._arrivals.watched(request.router_id) as received:
                await self._report(received, subscription, context, writing)
        finally:
            self._feed.unsubscribe(subscription)
            self._num_watches -= 1
            if not self._num_watches:
                self._feed.follow(None)

    async def _report(
        self,
        received: Callable[[], int],
        subscription: PrefixSubscription,
        context: Context,
        writing: WriteTimeout,
    ) -> None:
        last: pb.ReplicaLoad | None = None
        while True:
            core = self._engine.core
            self._feed.follow(None if core is None else core.state.cache.index)
            load = self._load(core)
            load.num_received = received()
            news = subscription.read()
            if news is not None or load != last:
                last = load
                writing.begin_write()
                await context.write(self._message(load, news, core))
                writing.end_write()
            await asyncio.sleep(INTERVAL_S)

    def _load(self, core: Scheduler | None) -> pb.ReplicaLoad:
        load = pb.ReplicaLoad(state=SERVER_STATES[self._engine.state], moves_streams=self._moves_streams())
        if core is None:
            return load
        pool, found = core.state.cache.pool, core_load(core)
        load.num_running = found.num_running
        load.num_waiting = found.num_waiting
        load.queued_tokens = found.num_queued_tokens
        load.prefill_s_per_token = found.prefill_s_per_token
        load.decode_step_s = found.decode_step_s
        load.occupancy = 1 - pool.num_free_blocks / (pool.num_blocks - 1)  # without the null block
        return load

    def _message(
        self, load: pb.ReplicaLoad, news: Snapshot | Changes | None, core: Scheduler | None
    ) -> pb.WatchResponse:
        message = pb.WatchResponse(load=load)
        if isinstance(news, Snapshot):
            message.snapshot.sequence_number = news.sequence_number
            message.snapshot.digests = news.digests
            if core is not None:
                index = core.state.cache.index
                message.snapshot.scheme = index.SCHEME
                message.snapshot.namespace = index.namespace
                message.snapshot.block_size = index.block_size
        elif news is not None:
            message.events.first_sequence_number = news.first_sequence_number
            message.events.published = news.published
            message.events.forgotten = news.forgotten
        return message

    async def Identify(self, request: pb.IdentifyRequest, context: Context) -> pb.IdentifyResponse:  # noqa: N802
        try:
            identity = await self._access.client(request.authorization)
        except ClientRefused as error:
            await context.abort(error.code, str(error))
        terms = self._terms_of(identity.tenant)
        return pb.IdentifyResponse(tenant=identity.tenant, weight=terms.weight, priority=terms.priority)
