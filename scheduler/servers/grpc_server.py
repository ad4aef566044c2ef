"""The gRPC server: Generation, Admin, health and reflection behind one address."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from quire.addresses import AddressUnusable, at_port, check_free
from quire.v1 import admin_pb2, generation_pb2
from quire.v1.admin_pb2_grpc import add_AdminServicer_to_server
from quire.v1.generation_pb2_grpc import add_GenerationServicer_to_server
from scheduler.servers.bounded_messages import BoundedMessages
from scheduler.servers.descriptors import max_grpc_connections

if TYPE_CHECKING:
    from scheduler.engine.engine import Engine
    from scheduler.servers.admin_server import AdminServer
    from scheduler.servers.generation_server import GenerationServer

GENERATE = "/quire.v1.Generation/Generate"
GENERATION = generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name
ADMIN = admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name

OPTIONS = [
    # Prevents two servers from sharing a port and splitting the clients between them.
    ("grpc.so_reuseport", 0),
    # Larger than the validator allows (2 MiB of text, or a million token ids), because its message is clearer. Not much
    # larger: messages are parsed on the event loop, where 2 million empty parts take half a second.
    ("grpc.max_receive_message_length", 4 * 2**20),
    # The most streams that a connection may have open. Without a limit, a client that opens streams and cancels each at
    # once (CVE-2023-44487) keeps the event loop busy with calls that nobody waits for. Clients queue what is above it.
    ("grpc.max_concurrent_streams", 128),
    # A connection that does not begin HTTP/2 within this time is closed, and one without streams after five minutes.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 300_000),
    # Detects clients that vanished without closing the connection, so that their requests are cancelled.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    # Allows clients to send keepalive pings.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
]


class GrpcServer:
    """The gRPC server; `address` has its real port. It closes connections beyond those that it has descriptors for."""

    def __init__(self, engine: Engine, generation: GenerationServer, admin: AdminServer, listen: str) -> None:
        """Binds the address. Raises AddressError, AddressInUse and AddressUnusable."""
        limit = ("grpc.max_allowed_incoming_connections", max_grpc_connections())
        self._server = grpc.aio.server(interceptors=[BoundedMessages(GENERATE)], options=[*OPTIONS, limit])
        add_GenerationServicer_to_server(generation, self._server)
        add_AdminServicer_to_server(admin, self._server)
        self._health = HealthReporter(engine)
        health_pb2_grpc.add_HealthServicer_to_server(self._health.servicer, self._server)
        services = (GENERATION, ADMIN, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(services, self._server)
        self.address = _bind(self._server, listen)

    async def start(self) -> None:
        await self._health.start()
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, and cancels the open ones after `grace_s`."""
        await self._health.stop()
        await self._server.stop(grace_s)


class HealthReporter:
    """Reports grpc.health.v1 for the server ("") and Generation: SERVING while the engine is ready, else NOT_SERVING.

    Admin is always SERVING, because it answers without an executor too.
    """

    def __init__(self, engine: Engine) -> None:
        self.servicer = health.aio.HealthServicer()
        self._engine = engine
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        engine.on_state_change(lambda _: self._changed.set())

    async def start(self) -> None:
        await self.servicer.set(ADMIN, health_pb2.HealthCheckResponse.SERVING)
        await self._report()
        self._task = asyncio.create_task(self._follow(), name="health")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
        await self.servicer.enter_graceful_shutdown()

    async def _follow(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._report()

    async def _report(self) -> None:
        response = health_pb2.HealthCheckResponse
        status = response.SERVING if self._engine.is_ready else response.NOT_SERVING
        for service in ("", GENERATION):
            await self.servicer.set(service, status)


def _bind(server: grpc.aio.Server, listen: str) -> str:
    """Returns the address with its real port. Raises AddressError, AddressInUse and AddressUnusable."""
    check_free(listen)
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise AddressUnusable(f"cannot listen on {listen}: {error}") from error
    return at_port(listen, port)
