"""Fixtures of the scheduler's tests: tokenizers, a checkpoint directory with one of them, and servers."""

import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer as FastTokenizer

from scheduler.text.checkpoint import Checkpoint
from tests.support.scheduler import small_tokenizers
from tests.support.scheduler.launcher import Launcher
from tests.support.scheduler.scripted_engine import ScriptedEngine, open_scripted_engine
from tests.support.scheduler.servers import Servers


@pytest.fixture(scope="session")
def byte_level() -> FastTokenizer:
    return small_tokenizers.byte_level()


@pytest.fixture
def checkpoint(tmp_path: Path, byte_level: FastTokenizer) -> Checkpoint:
    """A checkpoint with a byte-level tokenizer, a chat template, and EOS in generation_config.json."""
    byte_level.save(str(tmp_path / "tokenizer.json"))
    tokenizer_config = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "special": True},
        "chat_template": small_tokenizers.CHAT_TEMPLATE,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": byte_level.token_to_id("</s>")}))
    return Checkpoint(tmp_path)


@pytest.fixture
async def servers(checkpoint: Checkpoint) -> AsyncIterator[Servers]:
    servers = Servers(checkpoint)
    yield servers
    await servers.stop()


@pytest.fixture
async def scripted_engine(checkpoint: Checkpoint) -> AsyncIterator[ScriptedEngine]:
    async with open_scripted_engine(checkpoint) as scripted_engine:
        yield scripted_engine


@pytest.fixture
async def launcher(checkpoint: Checkpoint) -> AsyncIterator[Launcher]:
    launcher = Launcher(checkpoint)
    yield launcher
    await launcher.end()


@pytest.fixture(autouse=True)
def _unlimited_log(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Lets every refusal of a test into the log, though the tests of one second refuse more than the log takes.

    Tests of the limit itself have the mark `limited_log`.
    """
    if request.node.get_closest_marker("limited_log") is None:
        monkeypatch.setattr(logging.getLogger("scheduler.requests"), "filters", [])
