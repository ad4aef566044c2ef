"""Fixtures of the shell's tests: tokenizers, a checkpoint directory with one of them, and a server of it."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, cast

import grpc.aio
import pytest
from tokenizers import Tokenizer as FastTokenizer

from quire.v1.admin_pb2_grpc import AdminStub
from quire.v1.generation_pb2_grpc import GenerationStub
from scheduler.requests.generation_defaults import GenerationDefaults
from scheduler.requests.intake import Intake, ServedModel
from scheduler.requests.validation import RequestLimits
from scheduler.servers.admin_server import AdminServer
from scheduler.servers.generation_server import GenerationServer
from scheduler.servers.grpc_server import GrpcServer
from scheduler.telemetry.metrics import SchedulerMetrics
from scheduler.text.chat import ChatRenderer, load_template
from scheduler.text.checkpoint import Checkpoint
from scheduler.text.tokenizer import Tokenizer
from tests.support.scheduler import small_tokenizers
from tests.support.scheduler.fake_engine import FakeEngine
from tests.support.scheduler.theatre import Theatre, opened

if TYPE_CHECKING:
    from scheduler.engine.engine import Engine

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="session")
def byte_level() -> FastTokenizer:
    return small_tokenizers.byte_level()


@pytest.fixture(scope="session")
def sentencepiece() -> FastTokenizer:
    return small_tokenizers.sentencepiece()


@pytest.fixture
def checkpoint(tmp_path: Path, byte_level: FastTokenizer) -> Checkpoint:
    """A byte-level tokenizer, a chat template, EOS by generation_config.json."""
    byte_level.save(str(tmp_path / "tokenizer.json"))
    tokenizer_config = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "special": True},
        "chat_template": CHAT_TEMPLATE,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": byte_level.token_to_id("</s>")}))
    return Checkpoint(tmp_path)


async def until(condition: Callable[[], bool]) -> None:
    """Returns when it holds; the test's own timeout says when it never does."""
    while not condition():  # noqa: ASYNC110  (what is waited for has no event)
        await asyncio.sleep(0.001)


class Served:
    """A gRPC server on a port of its own, with a fake engine behind it."""

    def __init__(self, engine: FakeEngine, intake: Intake, server: GrpcServer, channel: grpc.aio.Channel) -> None:
        self.engine = engine
        self.intake = intake
        self.server = server
        self.channel = channel
        self.generation = GenerationStub(channel)
        self.admin = AdminStub(channel)

    async def idle(self) -> None:
        """When no stream is open any more."""
        await until(lambda: self.intake._num_streams == 0)


class Servers:
    """Starts servers, and stops them all."""

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
    ) -> Served:
        engine = engine or FakeEngine()
        tokenizer = Tokenizer.load(self._checkpoint)
        template = load_template(self._checkpoint)
        model = ServedModel(
            tokenizer=tokenizer,
            chat=ChatRenderer(template, tokenizer.special_tokens) if template else None,
            defaults=GenerationDefaults.load(self._checkpoint),
        )
        real_engine = cast("Engine", engine)
        self.metrics.engine = real_engine
        intake = Intake(real_engine, model, self.metrics, limits, max_streams=max_streams)
        generation = GenerationServer(intake, stalled_reader_timeout_s)
        server = GrpcServer(real_engine, generation, AdminServer(real_engine, intake, "fcfs"), listen)
        await server.start()
        channel = grpc.aio.insecure_channel(server.address, options=channel_options)
        self._stack.callback(tokenizer.close)
        if model.chat is not None:
            self._stack.push_async_callback(model.chat.close)
        self._stack.push_async_callback(server.stop, 0)
        self._stack.push_async_callback(channel.close)
        return Served(engine, intake, server, channel)

    async def stop(self) -> None:
        await self._stack.aclose()


@pytest.fixture
async def servers(checkpoint: Checkpoint) -> AsyncIterator[Servers]:
    servers = Servers(checkpoint)
    yield servers
    await servers.stop()


@pytest.fixture
async def theatre(checkpoint: Checkpoint) -> AsyncIterator[Theatre]:
    async with opened(checkpoint) as theatre:
        yield theatre
