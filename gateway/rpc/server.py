"""The gateway's gRPC server: Generation, Tokenization and health, for clients of `quire.v1`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.rpc.calls import TakenCalls
from gateway.rpc.servicers import GenerationForwarder, TokenizationForwarder
from quire.health_service import HealthService
from quire.v1.generation_pb2_grpc import add_GenerationServicer_to_server
from quire.v1.tokenization_pb2_grpc import add_TokenizationServicer_to_server
from scheduler.servers.bounded_messages import BoundedMessages
from scheduler.servers.grpc_server import BOUNDED, GENERATION, OPTIONS, bind
from scheduler.servers.read_requests import ReadRequests
from scheduler.servers.request_places import RequestPlaces
from scheduler.servers.reset_calls import ResetCalls

if TYPE_CHECKING:
    from gateway.config import GatewayConfig
    from gateway.metrics import GatewayMetrics
    from gateway.schedulers.schedulers import Schedulers
    from quire.tls import TlsFiles


class RpcServer:
    """Serves gRPC at `config.grpc_listen`, with the bounds that a scheduler has; `address` has the real port."""

    def __init__(
        self, schedulers: Schedulers, config: GatewayConfig, metrics: GatewayMetrics, tls: TlsFiles | None = None
    ) -> None:
        """Binds the address. Raises AddressError, AddressInUse, AddressUnusable and TlsError."""
        self._schedulers = schedulers
        self._generation = GenerationForwarder(
            schedulers, config.max_requests, config.stalled_reader_timeout_s, metrics
        )
        self._health = HealthService(config.stalled_reader_timeout_s)
        self._following: asyncio.Task[None] | None = None
        self._resets = ResetCalls()
        connections = ("grpc.max_allowed_incoming_connections", config.max_connections)
        self._server = grpc.aio.server(
            options=[*OPTIONS, connections],
            interceptors=[
                self._resets,
                TakenCalls(),
                ReadRequests(RequestPlaces(), config.stalled_reader_timeout_s),
                BoundedMessages(BOUNDED),
            ],
        )
        add_GenerationServicer_to_server(self._generation, self._server)
        add_TokenizationServicer_to_server(TokenizationForwarder(schedulers, metrics), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self.address = bind(self._server, config.grpc_listen or "", tls)

    async def start(self) -> None:
        self._following = asyncio.create_task(self._follow(), name="health")
        await self._server.start()

    async def stop(self, drain_timeout_s: float = 0.0) -> bool:
        """Refuses new requests, and waits for the open ones. Returns False if some had to be cancelled."""
        if self._following is not None:
            self._following.cancel()
        self._health.close()
        has_drained = await self._generation.requests.drain(drain_timeout_s)
        self._resets.close()
        await self._server.stop(1.0 if has_drained else 0.0)
        return has_drained

    async def _follow(self) -> None:
        while True:
            self._report()  # before it waits, so that no change is missed before this task runs
            await self._schedulers.changed()

    def _report(self) -> None:
        """Reports grpc.health.v1 for the server ("") and for Generation: SERVING if a scheduler is ready."""
        response = health_pb2.HealthCheckResponse
        status = response.SERVING if self._schedulers.is_ready else response.NOT_SERVING
        for service in ("", GENERATION):
            self._health.set(service, status)
