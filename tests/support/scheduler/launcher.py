"""Starts the scheduler as a process."""

import asyncio
import json
import signal
import sys
from typing import IO, Any

import grpc
import grpc.aio

from quire.v1 import generation_pb2 as pb
from scheduler.text.checkpoint import Checkpoint
from tests.support.paths import ROOT
from tests.support.scheduler.executor_service import ExecutorService

SCRIPT = """
import json, os, sys
from scheduler.config import SchedulerConfig
from scheduler.main import run
code = run(SchedulerConfig.from_dict(json.loads(sys.argv[1])))
try:
    print("torch" in sys.modules, flush=True)
except OSError:
    os._exit(code)
sys.exit(code)
"""


class Process:
    """A running scheduler. `addresses` are the ones in its `ready` line."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.addresses: dict[str, str] = {}

    async def ready(self) -> None:
        line = (await self._line()).split()
        assert line[0] == "ready"
        self.addresses = dict(word.split("=", 1) for word in line[1:])

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def ended(self) -> tuple[int, bool]:
        """Waits for the end. Returns the exit code, and whether torch was loaded."""
        has_torch = await self._line() == "True"
        return await asyncio.wait_for(self._process.wait(), 60), has_torch

    async def exit_code(self) -> int:
        """Waits for the end, without a look at its output."""
        return await asyncio.wait_for(self._process.wait(), 60)

    async def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def _line(self) -> str:
        assert self._process.stdout is not None
        return (await asyncio.wait_for(self._process.stdout.readline(), 60)).decode().strip()


class Launcher:
    """Starts executors in this process and schedulers in other processes, and ends them all."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._processes: list[Process] = []
        self._executors: list[ExecutorService] = []

    async def executor(self, step_s: float = 0.001) -> str:
        service = ExecutorService(vocab_size=380, step_s=step_s)
        await service.start()
        self._executors.append(service)
        return service.address

    async def scheduler(
        self, executor: str, *, stdout: int | IO[str] = asyncio.subprocess.PIPE, prelude: str = "", **config: Any
    ) -> Process:
        """Starts a scheduler. `prelude` is code that its process runs first."""
        values = {
            "model": str(self._checkpoint.directory),
            "listen": "127.0.0.1:0",
            "http_listen": "127.0.0.1:0",
            "executor": executor,
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            prelude + SCRIPT,
            json.dumps(values | config),
            cwd=ROOT,
            stdout=stdout,
            stderr=asyncio.subprocess.DEVNULL,
        )
        self._processes.append(Process(process))
        return self._processes[-1]

    async def end(self) -> None:
        for process in self._processes:
            await process.kill()
        for executor in self._executors:
            await executor.stop()


def request(max_tokens: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="hello fox", stopping=pb.StoppingParams(max_tokens=max_tokens, ignore_eos=True))


async def rest_of(call: Any) -> list[pb.GenerateResponse]:
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages
