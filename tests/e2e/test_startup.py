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


def test_missing_weights_are_reported(tmp_path: Path) -> None:
    model = model_directory(tmp_path, num_weight_bytes=0)
    run_quire("serve", f"--model={model}", *FREE_PORTS).check(exit_codes.USAGE, model, "no safetensors file")


def test_a_missing_tokenizer_is_reported(tmp_path: Path) -> None:
    model = model_directory(tmp_path, num_weight_bytes=0)
    (tmp_path / "tokenizer.json").unlink()
    found = run_quire("scheduler", f"--model={model}", *FREE_PORTS[:2])
    found.check(exit_codes.USAGE, model, "tokenizer.json")
    assert len(found.stderr.splitlines()) == 1


@pytest.mark.parametrize("num_weight_bytes", [5, 1_000_000])
def test_truncated_weights_are_reported(tmp_path: Path, num_weight_bytes: int) -> None:
    """The file is truncated in the length of the header, or in the tensors."""
    model = model_directory(tmp_path, num_weight_bytes=num_weight_bytes)
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


@pytest.mark.parametrize(
    ("service", "flag"),
    [
        ("scheduler", "--listen"),
        ("scheduler", "--http-listen"),
        ("executor", "--listen-address"),
    ],
)
def test_a_port_in_use_is_reported_by_each_service(service: str, flag: str, taken_address: str) -> None:
    own = {
        "scheduler": ["--listen=127.0.0.1:0", "--http-listen=127.0.0.1:0"],
        "executor": ["--listen-address=127.0.0.1:0", "--metrics-address="],
    }
    others = [free for free in own[service] if not free.startswith(f"{flag}=")]
    found = run_quire(service, f"{flag}={taken_address}", *others)
    found.check(exit_codes.ADDRESS_IN_USE, taken_address, "in use")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--frobnicate"], "--frobnicate"),
        (["scheduler", "--block-size=16"], "--block-size"),
        (["serve", "--block-size=many"], "--block-size"),
        (["serve", "--block-size=0"], "block_size"),
        (["serve", "--max-in-flight=0"], "max_in_flight"),
        (["serve", "--policy=shortest"], "policy"),
        (["serve", "--dtype=float8"], "dtype"),
        (["serve", "--listen=nowhere"], "listen"),
    ],
)
def test_an_invalid_flag_is_reported(arguments: list[str], words: str) -> None:
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


async def test_a_running_scheduler_has_not_loaded_torch(stack: Stack) -> None:
    async with stack.client() as client:
        await client.complete("Once upon a time", max_tokens=4)
        await client.complete([ChatMessage("user", "Tell me a story.")], max_tokens=4)
    scheduler, executor = stack.pid("scheduler"), stack.pid("executor")
    assert scheduler is not None
    assert executor is not None
    assert "libtorch" not in mapped(scheduler)
    assert "libtorch" in mapped(executor), "the check must be able to find torch"


def import_error(python: Path, module: str) -> str:
    """Returns the error output of an interpreter that imports a module."""
    words = [str(python), "-I", "-c", f"import {module}"]
    return str(subprocess.run(words, capture_output=True, text=True, check=False).stderr)


async def test_a_scheduler_runs_with_only_its_own_dependencies(tmp_path: Path) -> None:
    python = scheduler_environment(tmp_path)
    for absent in ("torch", "numba", "safetensors", "transformers"):
        assert f"No module named '{absent}'" in import_error(python, absent)

    with Stack(apart=True, scheduler=(str(python), "-P", "-m", "quire")) as stack:
        async with stack.client() as client:
            text = await client.complete("Once upon a time", max_tokens=8, temperature=0)
            chat = await client.complete([ChatMessage("user", "Tell me a story.")], max_tokens=8, temperature=0)
        assert len(text.token_ids) == len(chat.token_ids) == 8
        assert "libtorch" not in mapped(stack.scheduler.pid)
        command = psutil.Process(stack.scheduler.pid).cmdline()
        assert command[0] == str(python)
