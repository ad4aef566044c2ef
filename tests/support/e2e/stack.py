"""A complete server for tests: real processes on free ports of 127.0.0.1."""

import asyncio
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import fields
from types import TracebackType
from typing import Any, ClassVar, Self

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from executor.config import ExecutorConfig
from quire import AsyncClient, Client
from quire.cli.config_flags import arguments
from scheduler.config import SchedulerConfig
from tests.support.e2e.process import ROOT, Process, ProcessEnded
from tests.support.e2e.proxy import Proxy
from tests.support.e2e.waiting import WAIT_S, until

TINY = str(ROOT / "models" / "tiny")
QUIRE = (sys.executable, "-m", "quire")

_ADDRESS_IN_USE = 3
_SCHEDULER_FIELDS = {field.name for field in fields(SchedulerConfig)}
_EXECUTOR_FIELDS = {field.name for field in fields(ExecutorConfig)}
_DEFAULTS: dict[str, Any] = {
    "model": TINY,
    "num_blocks": 1024,
    "num_threads": 1,
    "listen": "127.0.0.1:0",
    "http_listen": "127.0.0.1:0",
    "gateway": False,
}


class Stack:
    """Runs a scheduler and an executor; a context manager, sync or async.

        async with Stack(num_blocks=64, max_in_flight=1) as stack, stack.client() as client:
            completion = await client.complete("Once upon a time", max_tokens=8)

    apart=False  `quire serve` runs both services
    apart=True   the services are two separate processes with `stack.proxy` between them
    scheduler    with apart: the command that runs `quire` for the scheduler
    flags        the flags of the command line, with underscores

    Leaving the context kills all processes. Their output is shown if the test fails.
    """

    recent: ClassVar[list["Stack"]] = []
    """The stacks whose logs are shown if the current test fails."""

    def __init__(self, *, apart: bool = False, scheduler: tuple[str, ...] = QUIRE, **flags: Any) -> None:
        self.apart = apart
        self._scheduler_command = scheduler
        self.flags = _DEFAULTS | flags
        self.grpc = ""
        self.http = ""
        self.metrics = ""
        self.openai = ""
        self.executor_address = ""
        self.processes: list[Process] = []
        self.proxy: Proxy | None = None
        self._services: dict[str, Process] = {}

    # --- start and stop -------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Starts the services; returns when they can generate completions."""
        self.show_log()
        try:
            self._start_apart() if self.apart else self._start_together()
        except BaseException:
            self.kill()
            raise
        return self

    def show_log(self) -> None:
        """Shows the log if the current test fails. A test need not call this for stacks that it starts itself."""
        if self not in Stack.recent:
            Stack.recent.append(self)

    def kill(self) -> None:
        """Kills all processes that still run."""
        for process in self.processes:
            process.kill()
        if self.proxy is not None:
            self.proxy.close()

    async def stop(self) -> int:
        """Sends SIGTERM to `quire serve` (apart: to the scheduler, then to the executor) and waits.

        Returns the first exit code that is not 0, or 0.
        """
        return_codes = [await self.ended(process, signal.SIGTERM) for process in self._in_order()]
        return next((code for code in return_codes if code), 0)

    async def ended(self, process: Process, number: signal.Signals | None = None) -> int:
        """Sends a signal, if one is given, and waits for the process to end. Returns the exit code."""
        if number is not None:
            process.send(number)
        return await asyncio.to_thread(process.wait)

    def launch_scheduler(self) -> Process:
        """Starts the scheduler (apart only), at its previous address if it had one; does not wait for it."""
        flags = self._flags_of(_SCHEDULER_FIELDS)
        if self.proxy is not None:
            flags["executor"] = self.proxy.address
        if self.grpc:
            flags |= {"listen": self.grpc, "http_listen": self.http}
        return self._launch("scheduler", flags, self._scheduler_command)

    async def restart_scheduler(self, command: tuple[str, ...] = (), **flags: Any) -> None:
        """Ends the scheduler (apart only) and starts it again at the same address, with these flags changed.

        command  runs `quire` for this scheduler and the next ones, if it is given
        """
        self.flags |= flags
        self._scheduler_command = command or self._scheduler_command
        await self.ended(self.scheduler, signal.SIGTERM)
        await asyncio.to_thread(self._await_ready_line, self.launch_scheduler())

    async def restart_executor(self) -> None:
        """Ends the executor (apart only) and starts another one at the same address; returns when it is ready."""
        await self.ended(self.executor, signal.SIGTERM)
        await asyncio.to_thread(self._await_executor, self._launch_executor())

    # --- for tests ------------------------------------------------------------------------------------------------

    def client(self, **options: Any) -> AsyncClient:
        """Returns a client whose calls have a very long timeout."""
        return AsyncClient(self.grpc, **({"timeout_s": 2 * WAIT_S} | options))

    def sync_client(self, **options: Any) -> Client:
        """Returns a synchronous client whose calls have a very long timeout."""
        return Client(self.grpc, **({"timeout_s": 2 * WAIT_S} | options))

    def pid(self, service: str) -> int | None:
        """Returns the process id of the running "scheduler" or "executor", or None."""
        if self.apart:
            process = self._services[service]
            return process.pid if process.return_code is None else None
        for child in psutil.Process(self.serve.pid).children():
            with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                words = child.cmdline()
                if (service, "quire") in zip(words[1:], words, strict=False) and child.status() != psutil.STATUS_ZOMBIE:
                    return int(child.pid)
        return None

    def send(self, service: str, number: signal.Signals) -> int:
        """Sends a signal to a service; returns its process id."""
        pid = self.pid(service)
        if pid is None:
            raise ProcessEnded(f"the {service} is not running")
        psutil.Process(pid).send_signal(number)
        return pid

    @asynccontextmanager
    async def frozen(self, service: str = "executor") -> AsyncIterator[None]:
        """Stops the process for the duration of the context, which must stay below ten seconds.

        After ten seconds the scheduler considers the executor lost.
        """
        pid = self.send(service, signal.SIGSTOP)
        try:
            yield
        finally:
            psutil.Process(pid).send_signal(signal.SIGCONT)

    def log(self) -> str:
        """Returns the output of all processes."""
        return "\n".join(process.log() for process in self.processes)

    @property
    def losses(self) -> list[str]:
        """The log lines of the scheduler about lost executors."""
        return [line for line in self.log().splitlines() if "executor lost" in line]

    @property
    def num_losses(self) -> int:
        return len(self.losses)

    @property
    def serve(self) -> Process:
        """The process of `quire serve`."""
        return self._services["serve"]

    @property
    def scheduler(self) -> Process:
        """The process of the scheduler (apart only)."""
        return self._services["scheduler"]

    @property
    def executor(self) -> Process:
        """The process of the executor (apart only)."""
        return self._services["executor"]

    async def health(self, service: str = "") -> str:
        """Returns the scheduler's status in grpc.health.v1, such as "SERVING", or the status code of a failed call."""
        async with grpc.aio.insecure_channel(self.grpc) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            try:
                response = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=WAIT_S)
            except grpc.aio.AioRpcError as error:
                return str(error.code().name)
            return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))

    async def readyz(self) -> int:
        """Returns the HTTP status of GET /readyz."""
        return (await self.get("/readyz"))[0]

    async def get(self, path: str) -> tuple[int, str]:
        """Returns the HTTP status and text of a page of the scheduler."""
        return await asyncio.to_thread(_get, f"http://{self.http}{path}")

    async def until_health(self, status: str) -> None:
        """Waits until the scheduler's health has this status."""

        async def has_status() -> bool:
            return await self.health() == status

        await until(has_status, f"health is {status}")

    # --- internal -------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    async def __aenter__(self) -> Self:
        return self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def _start_together(self, num_tries: int = 3) -> None:
        ports = {"metrics_address": "127.0.0.1:0"}
        serve = self._launch("serve", ports | self.flags)
        try:
            self._await_ready_line(serve)
        except ProcessEnded:
            # Another process may have taken the free port between its choice and its use.
            if num_tries == 1 or serve.wait() != _ADDRESS_IN_USE:
                raise
            self._start_together(num_tries - 1)

    def _start_apart(self) -> None:
        self._await_executor(self._launch_executor())
        self.proxy = Proxy(self.executor_address)
        self.proxy.start()
        self._await_ready_line(self.launch_scheduler())

    def _launch_executor(self) -> Process:
        flags = self._flags_of(_EXECUTOR_FIELDS) | {"metrics_address": ""}
        return self._launch("executor", flags | {"listen_address": self.executor_address or "127.0.0.1:0"})

    def _launch(self, name: str, flags: Mapping[str, Any], command: tuple[str, ...] = QUIRE) -> Process:
        process = Process(name, [*command, name, *arguments(flags)])
        self.processes.append(process)
        self._services[name] = process
        return process

    def _await_executor(self, process: Process) -> None:
        self.executor_address = process.line("ready ").removeprefix("ready ").strip()

    def _await_ready_line(self, process: Process) -> None:
        words = dict(word.split("=", 1) for word in process.line("ready ").split() if "=" in word)
        self.grpc, self.http, self.metrics = words["grpc"], words["http"], words.get("metrics", "")
        self.executor_address = words.get("executor", self.executor_address)
        self.openai = words.get("openai", "")

    def _flags_of(self, names: set[str]) -> dict[str, Any]:
        return {name: value for name, value in self.flags.items() if name in names}

    def _in_order(self) -> list[Process]:
        return [self.scheduler, self.executor] if self.apart else [self.serve]


def _get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=WAIT_S) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
