"""A service that cannot start gives a reason and the documented exit code; the scheduler needs no torch."""

import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from checks.wheel import FREE_PORTS
from quire import ChatMessage
from quire.cli import exit_codes
from tests.support.e2e.environment import scheduler_environment
from tests.support.e2e.process import Process
from tests.support.e2e.stack import QUIRE, TINY, Stack


@dataclass(frozen=True, slots=True)
class Ended:
    """The exit code and the output of a process that has ended."""

    return_code: int
    stdout: str
    stderr: str

    def check(self, return_code: int, *words: str) -> None:
        """Checks that the last line names the problem, and that there is no traceback and no ready line."""
        assert self.return_code == return_code, self.stderr
        last_line = self.stderr.splitlines()[-1]
        assert all(word in last_line for word in words), self.stderr
        assert "Traceback" not in self.stderr + self.stdout
        assert not self.stdout.startswith("ready")


def run_quire(*arguments: str) -> Ended:
    """Runs `quire` until it ends."""
    process = Process("quire", [*QUIRE, *arguments])
    try:
        return_code = process.wait()
        assert process.family() == [], "a process that it started is still running"
    finally:
        process.kill()
    return Ended(return_code, process.printed("stdout"), process.printed("stderr"))


def model_directory(directory: Path, *, num_weight_bytes: int) -> str:
    """Copies the embedded checkpoint with the first num_weight_bytes bytes of its weights, or without weights for 0."""
    for path in Path(TINY).glob("*.json"):
        shutil.copy(path, directory)
    if num_weight_bytes:
        weights = (Path(TINY) / "model.safetensors").read_bytes()
        (directory / "model.safetensors").write_bytes(weights[:num_weight_bytes])
    return str(directory)


@pytest.fixture
def taken_address() -> Iterator[str]:
    """Yields an address at which another socket listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("service", ["serve", "scheduler", "executor"])
def test_an_unknown_model_directory_is_reported(service: str, tmp_path: Path) -> None:
    found = run_quire(service, f"--model={tmp_path}/absent")
    found.check(exit_codes.USAGE, f"{tmp_path}/absent: no such directory")
    assert len(found.stderr.splitlines()) == 1


def test_a_directory_without_a_model_is_reported(tmp_path: Path) -> None:
    found = run_quire("serve", f"--model={tmp_path}")
    found.check(exit_codes.USAGE, str(tmp_path), "config.json")
    assert len(found.stderr.splitlines()) == 1


def test_a_missing_tokenizer_is_reported(tmp_path: Path) -> None:
    model = model_directory(tmp_path, num_weight_bytes=0)
    (tmp_path / "tokenizer.json").unlink()
    found = run_quire("scheduler", f"--model={model}", *FREE_PORTS[:2])
    found.check(exit_codes.USAGE, model, "tokenizer.json")
    assert len(found.stderr.splitlines()) == 1


def test_truncated_weights_are_reported(tmp_path: Path) -> None:
    """The file is truncated in the tensors."""
    model = model_directory(tmp_path, num_weight_bytes=1_000_000)
    found = run_quire("executor", f"--model={model}", "--listen-address=127.0.0.1:0", "--metrics-address=")
    found.check(exit_codes.USAGE, f"{model}/model.safetensors", "broken safetensors file")
    assert len(found.stderr.splitlines()) == 1


def test_truncated_weights_are_reported_by_the_supervisor(tmp_path: Path) -> None:
    """The file is truncated in the header."""
    model = model_directory(tmp_path, num_weight_bytes=1000)
    found = run_quire("serve", f"--model={model}", *FREE_PORTS)
    found.check(exit_codes.USAGE, "executor", f"{model}/model.safetensors", "broken safetensors file")


@pytest.mark.parametrize("flag", ["--listen", "--http-listen", "--executor", "--metrics-address"])
def test_a_port_in_use_is_reported(flag: str, taken_address: str) -> None:
    others = [free for free in FREE_PORTS if not free.startswith(f"{flag}=")]
    found = run_quire("serve", f"{flag}={taken_address}", *others)
    found.check(exit_codes.ADDRESS_IN_USE, taken_address, "in use")
    assert len(found.stderr.splitlines()) == 1


@pytest.mark.parametrize("flag", ["--listen", "--http-listen"])
def test_a_port_in_use_is_reported_by_the_scheduler(flag: str, taken_address: str) -> None:
    """The ports of the executor are checked in tests/executor/test_main.py."""
    others = [free for free in FREE_PORTS[:2] if not free.startswith(f"{flag}=")]
    found = run_quire("scheduler", f"{flag}={taken_address}", *others)
    found.check(exit_codes.ADDRESS_IN_USE, taken_address, "in use")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["serve", "--block-size=many"], "--block-size"), (["serve", "--block-size=0"], "block_size")],
)
def test_an_invalid_flag_is_reported(arguments: list[str], words: str) -> None:
    """Others are checked without a process, in test_config_flags.py."""
    run_quire(*arguments).check(exit_codes.USAGE, words)


def test_generating_without_a_server_is_reported(taken_address: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        free = f"127.0.0.1:{listener.getsockname()[1]}"
    found = run_quire("generate", "A fox", f"--address={free}")
    found.check(exit_codes.UNAVAILABLE, free)
    assert len(found.stderr.splitlines()) == 1


# --- without torch --------------------------------------------------------------------------------------------------


def mapped(pid: int) -> str:
    """Returns the files that a process and its children have mapped into memory."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return "".join(Path(f"/proc/{process.pid}/maps").read_text() for process in family)


@pytest.fixture(scope="module")
def apart_stack() -> Iterator[Stack]:
    with Stack(apart=True) as stack:
        yield stack


@pytest.fixture
def apart(apart_stack: Stack) -> Stack:
    """Returns a scheduler and an executor; a test may start the scheduler again in another way."""
    apart_stack.show_log()
    return apart_stack


async def completes(stack: Stack) -> None:
    """Checks that a text and a chat are completed."""
    async with stack.client() as client:
        text = await client.complete("Once upon a time", max_tokens=8, temperature=0)
        chat = await client.complete([ChatMessage("user", "Tell me a story.")], max_tokens=8, temperature=0)
    assert len(text.token_ids) == len(chat.token_ids) == 8


async def test_a_running_scheduler_has_not_loaded_torch(apart: Stack) -> None:
    await completes(apart)
    assert "libtorch" not in mapped(apart.scheduler.pid)
    assert "libtorch" in mapped(apart.executor.pid), "the check must be able to find torch"


def import_error(python: Path, module: str) -> str:
    """Returns the error output of an interpreter that imports a module."""
    words = [str(python), "-I", "-c", f"import {module}"]
    return str(subprocess.run(words, capture_output=True, text=True, check=False).stderr)


async def test_a_scheduler_runs_with_only_its_own_dependencies(apart: Stack, tmp_path: Path) -> None:
    python = scheduler_environment(tmp_path)
    for absent in ("torch", "numba", "safetensors", "transformers"):
        assert f"No module named '{absent}'" in import_error(python, absent)

    await apart.restart_scheduler(command=(str(python), "-P", "-m", "quire"))
    await completes(apart)
    assert "libtorch" not in mapped(apart.scheduler.pid)
    assert psutil.Process(apart.scheduler.pid).cmdline()[0] == str(python)
