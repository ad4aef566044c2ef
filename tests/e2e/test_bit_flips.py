"""A single bit that flips in any file of a model is found before anything is served, and the file is named."""

from __future__ import annotations

import random
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from executor.config import ExecutorConfig
from executor.errors import CheckpointError as WeightsError
from executor.loading import load_model as load_weights
from quire.checksums import MANIFEST, ChecksumError, read_manifest, write_manifest
from scheduler.config import SchedulerConfig
from scheduler.main import load_model as load_text
from scheduler.text.checkpoint import CheckpointError as TextError
from tests.support.e2e.stack import TINY
from tests.support.executor.checkpoints import make_checkpoint
from tests.support.hub import as_snapshot

if TYPE_CHECKING:
    from collections.abc import Iterator

WEIGHTS = ("config.json", "model.safetensors")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a small model with every kind of file, and without digests."""
    directory = make_checkpoint("qwen2-window", tmp_path_factory.mktemp("flips") / "model").directory
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(Path(TINY) / name, directory / name)
    (directory / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    (directory / "special_tokens_map.json").write_text('{"eos_token": "<|eos|>"}')
    return directory


def refusals(directory: Path) -> list[str]:
    """Returns what each service that refuses to start says."""
    messages = []
    try:
        load_text(SchedulerConfig(model=str(directory))).tokenizer.close()
    except TextError as error:
        messages.append(str(error))
    try:
        load_weights(
            ExecutorConfig(model=str(directory), device="cpu", kernels="reference", num_blocks=8), lambda line: None
        )
    except WeightsError as error:
        messages.append(str(error))
    return messages


def one_bit(numbers: random.Random, path: Path) -> int:
    """Draws a bit of a file; of weights, as often in the header as in the data."""
    num_bytes = path.stat().st_size
    if path.suffix == ".safetensors" and numbers.random() < 0.5:
        with path.open("rb") as file:
            num_bytes = 8 + int.from_bytes(file.read(8), "little")
    return numbers.randrange(8 * num_bytes)


@contextmanager
def flipped(path: Path, bit: int) -> Iterator[None]:
    def flip() -> None:
        with path.open("r+b") as file:
            file.seek(bit // 8)
            (byte,) = file.read(1)
            file.seek(bit // 8)
            file.write(bytes([byte ^ 1 << bit % 8]))

    flip()
    yield
    flip()


@pytest.mark.parametrize("source", ["manifest", "hub"])
def test_every_flipped_bit_is_refused_by_the_name_of_its_file(model: Path, tmp_path: Path, source: str) -> None:
    directory = shutil.copytree(model, tmp_path / "model") if source == "manifest" else as_snapshot(model, tmp_path)
    if source == "manifest":
        write_manifest(directory)
    assert refusals(directory) == []
    paths = sorted(path for path in directory.iterdir() if path.name != MANIFEST)
    assert len(paths) == 7
    for seed in range(250):
        numbers = random.Random(seed)
        path = numbers.choice(paths)
        bit = one_bit(numbers, path)
        with flipped(path, bit):
            messages = refusals(directory)
        readers = (path.name in WEIGHTS) + (path.name != "model.safetensors")
        assert len(messages) == readers, f"seed {seed}: bit {bit} of {path.name} is served: {messages}"
        assert all(message.startswith(f"{path}: the file is damaged") for message in messages), (seed, messages)
    assert refusals(directory) == []


def test_a_flipped_bit_of_a_manifest_is_refused(model: Path, tmp_path: Path) -> None:
    """It names the manifest, or a file that the manifest no longer describes."""
    directory = shutil.copytree(model, tmp_path / "model")
    write_manifest(directory)
    listed = read_manifest(directory)
    for seed in range(100):
        numbers = random.Random(seed)
        bit = one_bit(numbers, directory / MANIFEST)
        with flipped(directory / MANIFEST, bit):
            messages = refusals(directory)
            is_same = directory_lists(directory, listed)
        assert messages or is_same, f"seed {seed}: bit {bit} of the manifest is served"
        assert all(MANIFEST in message for message in messages)


def directory_lists(directory: Path, listed: dict[str, str] | None) -> bool:
    """Returns whether the manifest still means the same: a bit is the difference of a and A."""
    try:
        return read_manifest(directory) == listed
    except ChecksumError:
        return False
