"""What cannot start says why in one line and ends with the documented code; and the scheduler needs no torch."""

import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from quire import ChatMessage
from quire.cli import exit_codes
from tests.support.e2e.environment import scheduler_environment
from tests.support.e2e.process import Process
from tests.support.e2e.stack import QUIRE, TINY, Stack

FREE_PORTS = ("--listen=127.0.0.1:0", "--http-listen=127.0.0.1:0", "--executor=127.0.0.1:0", "--metrics-address=")


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process came to its end."""

    return_code: int
    stdout: str
    stderr: str

    def check(self, return_code: int, *words: str) -> None:
        """It said what is wrong in its last line, showed nobody a traceback, and never said that it was ready."""
        assert self.return_code == return_code, self.stderr
        last_line = self.stderr.splitlines()[-1]
        assert all(word in last_line for word in words), self.stderr
        assert "Traceback" not in self.stderr + self.stdout
        assert not self.stdout.startswith("ready")


def ended(*arguments: str) -> Ended:
    """Runs `quire` until it ends by itself."""
    process = Process("quire", [*QUIRE, *arguments])
    try:
        return_code = process.wait()
        assert process.family() == [], "nothing that it started is left"
    finally:
        process.kill()
    return Ended(return_code, process.printed("stdout"), process.printed("stderr"))


def model_directory(directory: Path, *, num_weight_bytes: int) -> str:
    """The embedded checkpoint with its weights cut off after so many bytes; without them for 0."""
    for path in Path(TINY).glob("*.json"):
        shutil.copy(path, directory)
    if num_weight_bytes:
        weights = (Path(TINY) / "model.safetensors").read_bytes()
        (directory / "model.safetensors").write_bytes(weights[:num_weight_bytes])
    return str(directory)


@pytest.fixture
def taken_address() -> Iterator[str]:
    """Somebody listens there."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("service", ["serve", "scheduler", "executor"])
def test_an_unknown_model_directory(service: str, tmp_path: Path) -> None:
    found = ended(service, f"--model={tmp_path}/absent")
    found.check(exit_codes.USAGE, f"{tmp_path}/absent: no such directory")
    assert len(found.stderr.splitlines()) == 1


def test_a_model_directory_that_holds_no_model(tmp_path: Path) -> None:
    found = ended("serve", f"--model={tmp_path}")
    found.check(exit_codes.USAGE, str(tmp_path), "config.json")
    assert len(found.stderr.splitlines()) == 1


def test_a_model_directory_without_weights(tmp_path: Path) -> None:
    model = model_directory(tmp_path, num_weight_bytes=0)
    ended("serve", f"--model={model}", *FREE_PORTS).check(exit_codes.USAGE, model, "no safetensors file")


def test_a_model_directory_without_a_tokenizer(tmp_path: Path) -> None:
    model = model_directory(tmp_path, num_weight_bytes=0)
    (tmp_path / "tokenizer.json").unlink()
    found = ended("scheduler", f"--model={model}", *FREE_PORTS[:2])
    found.check(exit_codes.USAGE, model, "tokenizer.json")
    assert len(found.stderr.splitlines()) == 1


@pytest.mark.parametrize("num_weight_bytes", [5, 1_000_000])
def test_weights_that_are_cut_off(tmp_path: Path, num_weight_bytes: int) -> None:
    """In the length of the header, and in the tensors."""
    model = model_directory(tmp_path, num_weight_bytes=num_weight_bytes)
    found = ended("executor", f"--model={model}", "--listen-address=127.0.0.1:0", "--metrics-address=")
    found.check(exit_codes.USAGE, f"{model}/model.safetensors", "broken safetensors file")
    assert len(found.stderr.splitlines()) == 1


def test_weights_that_are_cut_off_under_the_supervisor(tmp_path: Path) -> None:
    """In the header."""
    model = model_directory(tmp_path, num_weight_bytes=1000)
    found = ended("serve", f"--model={model}", *FREE_PORTS)
    found.check(exit_codes.USAGE, "executor", f"{model}/model.safetensors", "broken safetensors file")


@pytest.mark.parametrize("flag", ["--listen", "--http-listen", "--executor", "--metrics-address"])
def test_a_port_in_use(flag: str, taken_address: str) -> None:
    others = [free for free in FREE_PORTS if not free.startswith(f"{flag}=")]
    found = ended("serve", f"{flag}={taken_address}", *others)
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
def test_a_port_in_use_for_one_service(service: str, flag: str, taken_address: str) -> None:
    own = {
        "scheduler": ["--listen=127.0.0.1:0", "--http-listen=127.0.0.1:0"],
        "executor": ["--listen-address=127.0.0.1:0", "--metrics-address="],
    }
    others = [free for free in own[service] if not free.startswith(f"{flag}=")]
    found = ended(service, f"{flag}={taken_address}", *others)
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
def test_a_flag_that_cannot_be_meant(arguments: list[str], words: str) -> None:
    ended(*arguments).check(exit_codes.USAGE, words)


def test_generating_where_nobody_serves(taken_address: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        free = f"127.0.0.1:{listener.getsockname()[1]}"
    found = ended("generate", "A fox", f"--address={free}")
    found.check(exit_codes.UNAVAILABLE, free)
    assert len(found.stderr.splitlines()) == 1


# --- without torch --------------------------------------------------------------------------------------------------


def mapped(pid: int) -> str:
    """The files that a process and its children have in their memory."""
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
    assert "libtorch" in mapped(executor), "this is how it would look"


def import_error(python: Path, module: str) -> str:
    """What an interpreter says when it is to import this."""
    words = [str(python), "-I", "-c", f"import {module}"]
    return str(subprocess.run(words, capture_output=True, text=True, check=False).stderr)


async def test_a_scheduler_runs_with_its_own_dependencies_alone(tmp_path: Path) -> None:
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
