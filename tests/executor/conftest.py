"""Random checkpoints and runners, made once per session."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import torch

from executor.config import ExecutorConfig
from executor.device.runner import ModelRunner
from executor.loading import load_model
from executor.server import Server
from quire.executor.v1.executor_pb2_grpc import ExecutorStub
from tests.support.executor.checkpoints import RandomCheckpoint, make_checkpoint
from tests.support.executor.fake_runner import FakeRunner, loaded
from tests.support.executor.served import CONFIG

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

MakeRunner = Callable[..., ModelRunner]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], RandomCheckpoint]:
    """Returns a function that makes the checkpoint of a family in `checkpoints.FAMILIES`, once for all tests."""
    made: dict[str, RandomCheckpoint] = {}

    def get(name: str) -> RandomCheckpoint:
        if name not in made:
            made[name] = make_checkpoint(name, tmp_path_factory.mktemp("checkpoints") / name)
        return made[name]

    return get


@pytest.fixture(scope="session")
def make_runner() -> MakeRunner:
    """Returns a function that makes a runner for a directory, with settings of ExecutorConfig."""

    def make(directory: Path, **settings: Any) -> ModelRunner:
        defaults = {
            "kernels": "reference",
            "block_size": 4,
            "num_blocks": 200,
            "max_num_seqs": 8,
            "device": "cpu",
        }
        return load_model(ExecutorConfig(model=str(directory), **{**defaults, **settings}), lambda line: None).runner

    return make


@pytest.fixture
def fake_runner() -> FakeRunner:
    return FakeRunner()


@pytest.fixture
async def server(fake_runner: FakeRunner) -> AsyncIterator[Server]:
    server = Server(CONFIG, loaded(fake_runner))
    server.address = await server.start()
    yield server
    fake_runner.gate.set()
    await server.stop()


@pytest.fixture
async def channel(server) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(server.address) as channel:
        yield channel


@pytest.fixture
def stub(channel) -> ExecutorStub:
    return ExecutorStub(channel)
