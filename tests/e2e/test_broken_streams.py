"""A scheduler that dies changes nothing in the text of `quire generate`; other weights end a stream with the reason."""

import asyncio
import os
import shutil
import signal
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from quire import OtherModelError
from quire.checksums import MANIFEST
from tests.support.e2e.stack import TINY, Stack
from tests.support.e2e.streams import Job, StreamGroup
from tests.support.e2e.waiting import until


async def generated(stack: Stack, *, is_disturbed: bool = False) -> tuple[bytes, str]:
    """Returns what `quire generate` prints, and its notes. A disturbed run loses its scheduler after some text."""
    words = [sys.executable, "-m", "quire", "generate", "--address", stack.grpc, "--n", "2", "--seed", "5"]
    words += ["--max-tokens", "1000", "--ignore-eos", "--logprobs", "1", "--stats", "Once upon a time"]
    process = await asyncio.create_subprocess_exec(*words, stdout=PIPE, stderr=PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    text = await process.stdout.readexactly(60)
    if is_disturbed:
        stack.send("scheduler", signal.SIGKILL)
    rest, notes = await asyncio.gather(process.stdout.read(), process.stderr.read())
    assert await process.wait() == 0
    return text + rest, notes.decode()


async def test_generate_prints_the_same_text_when_the_scheduler_is_killed() -> None:
    async with Stack() as stack:
        text, notes = await generated(stack)
        assert "broke off" not in notes
        assert len(text) > 3000  # the scheduler is killed long before its last tokens
        same_text, other_notes = await generated(stack, is_disturbed=True)
    assert same_text == text
    lines = other_notes.splitlines()
    assert [line for line in lines if not line.startswith("quire: ")] == notes.splitlines()
    assert "the stream broke off" in other_notes
    assert lines.count("quire: the stream continues") == 1


@pytest.mark.exhaustive
async def test_other_weights_under_the_same_name_never_continue_a_stream(tmp_path: Path) -> None:
    """The files change, and both services come back."""
    directory = tmp_path / "tiny"
    shutil.copytree(TINY, directory)
    (directory / MANIFEST).unlink()
    async with Stack(model=str(directory)) as stack, stack.client() as client:
        name = (await client.server_info()).model_name
        job = Job("Once upon a time", {"temperature": 0, "max_tokens": 1500, "ignore_eos": True})
        streams = StreamGroup(client, [job]).start()
        await streams.until(lambda streams: streams.all_have(5))

        weights = load_file(directory / "model.safetensors")
        weights["model.norm.weight"][0] *= 1.5
        save_file(weights, tmp_path / "new")
        os.replace(tmp_path / "new", directory / "model.safetensors")
        killed = [stack.send(service, signal.SIGKILL) for service in ("scheduler", "executor")]

        (failure,) = await streams.failures()
        assert isinstance(failure, OtherModelError)
        assert "the server has another model or other weights than the one that began the stream" in str(failure)
        assert client.num_resumptions == 0
        await until(lambda: not {stack.pid("scheduler"), stack.pid("executor")} & {None, *killed})
        assert (await client.server_info()).model_name == name
        assert (await client.complete("Once upon a time", max_tokens=3)).text
