"""The gRPC servers: Generation at the public address and at the local one, Admin and reflection at the admin address.

Health is at all of them.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from quire.addresses import UNIX, AddressUnusable, at_port, check_free, default_admin_address, private_files
from quire.health_service import HealthService
from quire.tls import server_credentials
from quire.v1 import admin_pb2, generation_pb2, replica_pb2, tokenization_pb2
from quire.v1.admin_pb2_grpc import add_AdminServicer_to_server
from quire.v1.generation_pb2_grpc import add_GenerationServicer_to_server
from quire.v1.replica_pb2_grpc import add_ReplicaServicer_to_server
from quire.v1.tokenization_pb2_grpc import add_TokenizationServicer_to_server
from scheduler.core.tenants.account import equal_terms
from scheduler.identity.identity import LOCAL, Identity
from scheduler.servers.access import Access
from scheduler.servers.bounded_messages import BoundedMessages
from scheduler.servers.descriptors import max_grpc_connections
from scheduler.servers.grpc_access import AccessInterceptor
from scheduler.servers.read_requests import ReadRequests
from scheduler.servers.replica_server import ReplicaServer
from scheduler.servers.request_places import RequestPlaces
from scheduler.servers.reset_calls import ResetCalls

if TYPE_CHECKING:
    from quire.tls import TlsFiles
    from scheduler.core.tenants.account import TermsOf
    from scheduler.engine.engine import Engine
    from scheduler.servers.admin_server import AdminServer
    from scheduler.servers.generation_server import GenerationServer
    from scheduler.servers.tokenization_server import TokenizationServer

GENERATE = "/quire.v1.Generation/Generate"

BOUNDED = {
    GENERATE: generation_pb2.GenerateRequest.DESCRIPTOR,
    "/quire.v1.Generation/GenerateMany": generation_pb2.GenerateManyRequest.DESCRIPTOR,
    "/quire.v1.Tokenization/Tokenize": tokenization_pb2.TokenizeRequest.DESCRIPTOR,
    "/quire.v1.Tokenization/Detokenize": tokenization_pb2.DetokenizeRequest.DESCRIPTOR,
}
"""Methods whose requests may be large. Their fields are counted; the requests of all other methods have to be small."""
GENERATION = generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name
TOKENIZATION = tokenization_pb2.DESCRIPTOR.services_by_name["Tokenization"].full_name
REPLICA = replica_pb2.DESCRIPTOR.services_by_name["Replica"].full_name
ADMIN = admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name

MAX_PENDING_CALLS = 16_384

OPTIONS = [
    # Prevents two servers from sharing a port and splitting the clients between them.
    ("grpc.so_reuseport", 0),
    # Larger than the validator allows (2 MiB of text, or a million token ids), because its message is clearer. Not much
    # larger: messages are parsed on the event loop, where 2 million empty parts take half a second.
    ("grpc.max_receive_message_length", 4 * 2**20),
    # Credentials may have 8 KiB, and other metadata comes with them. Beyond this, gRPC refuses some calls at random.
    ("grpc.max_metadata_size", 12 * 2**10),
    # gRPC receives 64 KiB of a request before it is read. With the probe it would receive megabytes on fast networks.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 2**16),
    # Limits the streams that a connection may have open; clients queue the others. Without a limit, a client that opens
    # streams and cancels each at once (CVE-2023-44487) keeps the event loop busy with calls without a reader.
    ("grpc.max_concurrent_streams", 256),
    # As many streams may have ended without being released yet. By default new ones are refused in their place, even if
    # the client has fewer than 256 open.
    ("grpc.http2.max_deallocating_streams", 256),
    # gRPC queues the calls that arrive faster than the event loop takes them. If a thousand wait, it cancels some by
    # default, also those of other clients.
    ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
    # A connection that does not begin HTTP/2 within this time is closed, and one without streams after five minutes.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 300_000),
    # Detects clients that vanished without closing the connection, so that their requests are cancelled.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    # Allows clients to send keepalive pings. The interval is half of that of the clients, because pings that were sent
    # ten seconds apart can arrive closer together; the third one that comes too early would end the connection.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
]


MAX_ADMIN_CONNECTIONS = 128


class GrpcServer:
    """All gRPC servers; `address` and `admin_address` have their real ports.

    The public one closes connections beyond those that it has descriptors for.

    admin_listen  None: the default for the public address, a Unix socket
    local_listen  a Unix socket for a gateway of this user, which needs no key of its own; None: there is none
    terms_of      returns what the operator grants a tenant, which gateways are told
    """

    def __init__(
        self,
        engine: Engine,
        generation: GenerationServer,
        tokenization: TokenizationServer,
        admin: AdminServer,
        listen: str,
        admin_listen: str | None = None,
        access: Access | None = None,
        local_listen: str | None = None,
        terms_of: TermsOf = equal_terms,
    ) -> None:
        """Binds the addresses. Raises AddressError, AddressInUse and AddressUnusable."""
        access = access or Access()
        self._health = HealthService(generation.stalled_reader_timeout_s)
        report_health(engine, self._health)
        self._generation = generation
        self._admin_calls = admin
        limit = ("grpc.max_allowed_incoming_connections", max_grpc_connections())
        self._resets = ResetCalls()
        places, timeout_s = RequestPlaces(), generation.stalled_reader_timeout_s
        arrivals = generation.arrivals
        replica = ReplicaServer(engine, access, arrivals, lambda: admin.moves_streams, terms_of, timeout_s)
        # Calls that need no identity, which may be half-open, take no places of the others.
        places_of_unknown = RequestPlaces(max_reads=8, max_reads_of_a_tenant=4)

        def generating(default: Identity | None, *more: tuple[str, int]) -> grpc.aio.Server:
            # Access is decided first, so that nothing is read of a call that is refused.
            interceptors = [
                self._resets,
                AccessInterceptor(access, default),
                ReadRequests(places, timeout_s, places if default is LOCAL else places_of_unknown),
                BoundedMessages(BOUNDED),
            ]
            server = grpc.aio.server(options=[*OPTIONS, *more], interceptors=interceptors)
            add_GenerationServicer_to_server(generation, server)
            add_TokenizationServicer_to_server(tokenization, server)
            add_ReplicaServicer_to_server(replica, server)
            health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
            return server

        self._public = generating(access.verifier.stranger, limit)
        self.address = bind(self._public, listen, access.tls)
        if admin_listen is None:
            admin_listen = default_admin_address(self.address)
        # A process that could open the socket runs as the user of this process, which could do everything anyway.
        default = LOCAL if admin_listen.startswith(UNIX) else access.verifier.stranger
        interceptors = [
            self._resets,
            AccessInterceptor(access, default, is_audit=True),
            ReadRequests(places, timeout_s, places if default is LOCAL else places_of_unknown),
            BoundedMessages(BOUNDED),
        ]
        few = ("grpc.max_allowed_incoming_connections", MAX_ADMIN_CONNECTIONS)
        self._admin = grpc.aio.server(options=[*OPTIONS, few], interceptors=interceptors)
        add_AdminServicer_to_server(admin, self._admin)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._admin)
        # Reflection describes all services, although Generation is at the other address.
        services = (GENERATION, TOKENIZATION, REPLICA, ADMIN, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(services, self._admin)
        self.admin_address = bind(self._admin, admin_listen, access.tls)
        self._servers = [self._public, self._admin]
        if local_listen is not None:
            self._servers.append(generating(LOCAL))
            bind(self._servers[-1], local_listen, access.tls)

    async def start(self) -> None:
        await asyncio.gather(*(server.start() for server in self._servers))

    def move_streams(self) -> None:
        """Asks routers to continue their streams at other schedulers."""
        self._admin_calls.moves_streams = True

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, and cancels the open ones after `grace_s`."""
        self._health.close()
        self._generation.stop()
        self._resets.close()
        await asyncio.gather(*(server.stop(grace_s) for server in self._servers))


def report_health(engine: Engine, health: HealthService) -> None:
    """Keeps the status of the server ("") and of Generation: SERVING while the engine is ready, else NOT_SERVING.

    Admin is always SERVING, because it answers without an executor too.
    """
    kind = health_pb2.HealthCheckResponse

    def report(_: object = None) -> None:
        for service in ("", GENERATION):
            health.set(service, kind.SERVING if engine.is_ready else kind.NOT_SERVING)

    health.set(ADMIN, kind.SERVING)
    report()
    engine.on_state_change(report)


def bind(server: grpc.aio.Server, listen: str, tls: TlsFiles | None) -> str:
    """Returns the address with its real port. Raises AddressError, AddressInUse, AddressUnusable and TlsError."""
    check_free(listen)
    try:
        if tls is None or listen.startswith(UNIX):
            with private_files(listen):
                port = server.add_insecure_port(listen)
        else:
            port = server.add_secure_port(listen, server_credentials(tls, tls.ca is not None))
    except RuntimeError as error:
        raise AddressUnusable(f"cannot listen on {listen}: {error}") from error
    return at_port(listen, port)
