"""Starts gRPC servers with a fake engine, for tests of the public services."""

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, cast

import grpc.aio

from quire.v1.admin_pb2_grpc import AdminStub
from quire.v1.generation_pb2_grpc import GenerationStub
from scheduler.core.tenants.account import TermsOf, equal_terms
from scheduler.requests.generation_defaults import GenerationDefaults
from scheduler.requests.intake import Intake, ServedModel
from scheduler.requests.limits import RequestLimits
from scheduler.servers.access import Access
from scheduler.servers.admin_server import AdminServer
from scheduler.servers.generation_server import GenerationServer
from scheduler.servers.grpc_server import GrpcServer
from scheduler.servers.tokenization_server import TokenizationServer
from scheduler.telemetry.metrics import SchedulerMetrics
from scheduler.text.chat import ChatRenderer, load_template
from scheduler.text.checkpoint import Checkpoint
from scheduler.text.grammars import GrammarCompiler
from scheduler.text.tokenizer import Tokenizer
from tests.support.scheduler.fake_engine import FakeEngine
from tests.support.waiting import until

if TYPE_CHECKING:
    from scheduler.engine.engine import Engine


class Served:
    """A gRPC server on its own port, with a fake engine."""

    def __init__(
        self,
        engine: FakeEngine,
        intake: Intake,
        server: GrpcServer,
        channel: grpc.aio.Channel,
        admin_channel: grpc.aio.Channel,
    ) -> None:
        self.engine = engine
        self.intake = intake
        self.server = server
        self.channel = channel
        self.generation = GenerationStub(channel)
        self.admin_channel = admin_channel
        self.admin = AdminStub(admin_channel)

    async def idle(self) -> None:
        """Returns when no stream is open."""
        await until(lambda: not self.intake.open_streams)


class Servers:
    """Starts servers, and stops all of them."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._stack = AsyncExitStack()
        self.metrics = SchedulerMetrics()

    async def start(
        self,
        engine: FakeEngine | None = None,
        limits: RequestLimits | None = None,
        max_streams: int = 100,
        stalled_reader_timeout_s: float = 60.0,
        channel_options: list[tuple[str, int]] | None = None,
        listen: str = "127.0.0.1:0",
        admin_listen: str | None = None,
        access: Access | None = None,
        local_listen: str | None = None,
        grammars: GrammarCompiler | None = None,
        terms_of: TermsOf = equal_terms,
    ) -> Served:
        engine = engine or FakeEngine()
        tokenizer = Tokenizer.load(self._checkpoint)
        template = load_template(self._checkpoint)
        variables, tokens = tokenizer.special_tokens, tokenizer.control_tokens
        model = ServedModel(
            tokenizer=tokenizer,
            chat=ChatRenderer(template, variables, tokens=tokens) if template else None,
            defaults=GenerationDefaults.load(self._checkpoint),
            grammars=grammars,
        )
        real_engine = cast("Engine", engine)
        self.metrics.engine = real_engine
        intake = Intake(real_engine, model, self.metrics, limits, max_streams=max_streams)
        generation = GenerationServer(real_engine, intake, "fcfs", stalled_reader_timeout_s, access)
        admin, tokenization = AdminServer(real_engine, intake), TokenizationServer(intake)
        addresses = (listen, admin_listen)
        server = GrpcServer(real_engine, generation, tokenization, admin, *addresses, access, local_listen, terms_of)
        await server.start()
        channel = grpc.aio.insecure_channel(server.address, options=channel_options)
        admin_channel = grpc.aio.insecure_channel(server.admin_address)
        self._stack.callback(tokenizer.close)
        if grammars is not None:
            self._stack.push_async_callback(grammars.close)
        if model.chat is not None:
            self._stack.push_async_callback(model.chat.close)
        self._stack.push_async_callback(server.stop, 0)
        self._stack.push_async_callback(channel.close)
        self._stack.push_async_callback(admin_channel.close)
        return Served(engine, intake, server, channel, admin_channel)

    async def stop(self) -> None:
        await self._stack.aclose()
