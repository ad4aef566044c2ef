"""Children that hang are killed and restarted."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.addresses import with_port
from quire.cli.child import Child, ChildSpec
from quire.cli.restarts import RestartPolicy
from quire.cli.supervisor import Supervisor
from quire.cli.watch import handshake_probe, health_probe, liveness_probe, replace_when_hung
from quire.tls import ssl_context
from tests.support.certificates import Authority
from tests.support.client.children import SLEEP, Log, child, yes
from tests.support.waiting import until

IDLE = "import time; {}time.sleep(600)"
READY = IDLE.format("print('ready at an address', flush=True); ")
LOADING = IDLE.format("print('loading, nearly ready', flush=True); ")


class Watched:
    """A supervised child, and the answer of its health check."""

    def __init__(self, program: str) -> None:
        self.lines: list[str] = []
        self.is_serving = True
        self.num_checks = 0
        self.supervisor = Supervisor(
            [ChildSpec("executor", (sys.executable, "-I", "-S", "-c", program))],
            log=lambda name, line: self.lines.append(line),
            policy=RestartPolicy(first_delay_s=0.01),
        )

    async def probe(self, timeout_s: float) -> bool:
        self.num_checks += 1
        return self.is_serving

    async def checked(self, num_times: int) -> None:
        target = self.num_checks + num_times
        await until(lambda: self.num_checks >= target)


@asynccontextmanager
async def watched(program: str, *, is_serving: bool = True, load_timeout_s: float = 3600.0) -> AsyncIterator[Watched]:
    it = Watched(program)
    it.is_serving = is_serving

    async def ready() -> bool:
        return bool(it.lines)

    async with it.supervisor:
        await it.supervisor.until_ready(ready)
        watch = asyncio.create_task(replace_when_hung(it.supervisor, "executor", it.probe, 0.02, load_timeout_s))
        yield it
        watch.cancel()


async def test_a_child_that_stops_serving_is_replaced() -> None:
    async with watched(READY) as it:
        first = it.supervisor.pid("executor")
        await it.checked(2)
        it.is_serving = False
        await until(lambda: len(it.lines) >= 3)
        assert it.lines[:3] == [
            "ready at an address",
            "executor has not served for 0.02 s: killed",
            "executor was killed by SIGABRT; restarting it in 0.01 s",
        ]
        await until(lambda: it.supervisor.pid("executor") not in (None, first))


async def test_a_child_that_hangs_as_soon_as_it_is_ready_is_replaced_too() -> None:
    async with watched(READY) as it:
        it.is_serving = False
        await until(lambda: it.lines.count("ready at an address") >= 2)


async def test_a_child_that_is_not_ready_yet_is_left_alone() -> None:
    async with watched(LOADING, is_serving=False) as it:
        first = it.supervisor.pid("executor")
        await it.checked(12)
        assert it.supervisor.pid("executor") == first
        assert len(it.lines) == 1


async def test_a_child_that_prints_no_line_while_it_starts_is_replaced() -> None:
    """The time covers the start of Python, which takes long beside other tests."""
    async with watched(LOADING, is_serving=False, load_timeout_s=1.0) as it:
        await until(lambda: it.lines.count("loading, nearly ready") >= 3)
        assert it.lines[1] == "executor has not printed a line for 1 s: killed"


async def test_lines_of_progress_keep_a_child_that_starts() -> None:
    program = IDLE.format("exec('while True: print(0, flush=True); time.sleep(0.001)'); ")
    async with watched(program, is_serving=False, load_timeout_s=1.0) as it:
        first = it.supervisor.pid("executor")
        await it.checked(200)
        assert it.supervisor.pid("executor") == first


async def test_the_first_check_after_ready_is_not_counted_with_those_before() -> None:
    """A check that began before the line `ready` may fail after it."""
    async with watched(LOADING, is_serving=False, load_timeout_s=0.1) as it:
        ready = iter([False] * 19 + [True] * 3)
        it.supervisor.has_said_ready = lambda name: next(ready, False)  # type: ignore[method-assign]
        await it.checked(22)
        assert len(it.lines) == 1


async def test_a_child_that_hangs_prints_the_stacks_of_its_threads() -> None:
    program = "def stuck():\n    print('ready', flush=True)\n    while True: pass\nstuck()"
    log = Log()
    spec = ChildSpec("executor", (sys.executable, "-I", "-S", "-X", "faulthandler", "-c", program))
    async with Supervisor([spec], log=log, policy=RestartPolicy(first_delay_s=0.01)) as supervisor:
        await supervisor.until_ready(yes)
        await log.until("executor", "ready")
        await supervisor.end_hung("executor", "has a fault")
        await log.until("executor", "ready", count=2)
    assert "Fatal Python error: Aborted" in log.of("executor")
    assert any("in stuck" in line for line in log.of("executor"))
    assert log.of("supervisor")[0] == "executor has a fault: killed"


@pytest.mark.parametrize("number", [signal.SIGSTOP, None])
async def test_a_child_that_handles_no_signal_is_killed(number: signal.Signals | None) -> None:
    ignores = "import signal; signal.signal(signal.SIGABRT, signal.SIG_IGN); "
    log = Log()
    stubborn = Child(child("executor", ignores + SLEEP), log)
    await stubborn.start()
    waiting = asyncio.create_task(stubborn.wait())
    await log.until("executor", "up")
    if number is not None:
        os.kill(stubborn.pid or 0, number)
    assert not await stubborn.end(signal.SIGABRT, 0.05)
    assert (await waiting).return_code == -signal.SIGKILL


async def test_up_to_three_failed_checks_are_tolerated() -> None:
    async with watched(READY) as it:
        answers = [True, False, False, False] * 5

        async def probe(timeout_s: float) -> bool:
            return answers.pop(0) if answers else True

        watch = asyncio.create_task(replace_when_hung(it.supervisor, "executor", probe, 0.02, 3600))
        await until(lambda: not answers)
        assert it.lines == ["ready at an address"]
        watch.cancel()


async def test_a_killed_process_that_has_not_ended_yet_is_not_killed_at_each_check() -> None:
    num_checks, killed_at = 0, []

    async def probe(timeout_s: float) -> bool:
        nonlocal num_checks
        num_checks += 1
        return False

    async def end_hung(name: str, problem: str) -> None:
        killed_at.append(num_checks)

    process: Any = SimpleNamespace(pid=lambda _: 7, has_said_ready=lambda _: True, end_hung=end_hung)
    watch = asyncio.create_task(replace_when_hung(process, "executor", probe, 0.02, 3600.0))
    await until(lambda: num_checks >= 13)
    watch.cancel()
    assert killed_at[:3] == [4, 8, 12]


async def test_an_address_without_a_server_is_not_serving() -> None:
    async with health_probe(with_port("127.0.0.1:0")) as is_serving:
        assert await is_serving(5.0) is False


async def answer(reply: bytes | None, http_address: str) -> asyncio.Server:
    """Starts a server that answers every connection with `reply` and closes it; None: it is silent."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET /healthz ")
        if reply is not None:
            writer.write(reply)
            writer.close()

    host, port = http_address.rsplit(":", 1)
    return await asyncio.start_server(serve, host, int(port))


async def test_only_a_server_that_answers_200_in_time_is_alive() -> None:
    address = with_port("127.0.0.1:0")
    is_alive = liveness_probe(address)
    assert await is_alive(5.0) is False
    for reply, expected in (
        (b"HTTP/1.1 200 OK\r\n\r\nok\n", True),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\nstuck\n", False),
        (b"200" * 50_000, False),
        (b"", True),  # it has as many connections as it may have
    ):
        server = await answer(reply, address)
        assert await is_alive(5.0) is expected
        server.close()
    server = await answer(None, address)  # accepts, and is silent like a stopped process
    assert await is_alive(0.05) is False
    server.close()


async def test_a_process_that_was_alive_without_saying_ready_is_replaced() -> None:
    async with watched(LOADING) as it:
        await it.checked(2)
        it.is_serving = False
        await until(lambda: len(it.lines) >= 3)
        assert it.lines[1] == "executor has not served for 0.02 s: killed"


@pytest.mark.parametrize("needs_certificate", [False, True])
async def test_a_server_with_tls_is_alive_if_it_takes_part_in_the_handshake(
    needs_certificate: bool, tmp_path: Path
) -> None:
    context = ssl_context(Authority.create(tmp_path).issue_for_loopback(), needs_certificate)

    async def nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(nothing, "127.0.0.1", 0, ssl=context) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert await handshake_probe(address)(30.0)
    assert not await handshake_probe(address)(30.0)


async def test_a_server_that_begins_no_handshake_is_not_alive() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert not await handshake_probe(address)(0.2)


async def test_a_child_does_not_get_the_variables_that_it_must_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SECRET", "PUBLIC"):
        monkeypatch.setenv(name, "x")
    log = Log()
    program = "import os; print([name for name in ('SECRET', 'PUBLIC') if name in os.environ])"
    started = Child(ChildSpec("gateway", (sys.executable, "-c", program), without=("SECRET",)), log)
    await started.start()
    await started.wait()
    assert log.of("gateway") == ["['PUBLIC']"]


FAILED_HANDSHAKES = """
import socket, sys, grpc
from concurrent import futures
server = grpc.server(futures.ThreadPoolExecutor(1))
key, certificate = (open(path, "rb").read() for path in sys.argv[1:])
port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, certificate)]))
server.start()
for _ in range(3):
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"GET / HTTP/1.1\\r\\n\\r\\n")
        connection.recv(1000)
server.stop(0).wait()
print("done")
"""


async def test_failed_handshakes_at_a_child_write_no_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers decide how often they come."""
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    files, log = Authority.create(tmp_path).issue("server", "DNS:localhost"), Log()
    command = (sys.executable, "-c", FAILED_HANDSHAKES, files.key, files.certificate)
    started = Child(ChildSpec("scheduler", command), log)
    await started.start()
    await started.wait()
    assert log.of("scheduler") == ["done"]


@pytest.mark.parametrize("num_turns", range(6))
async def test_a_cancelled_check_ends_though_its_answer_has_just_come(
    monkeypatch: pytest.MonkeyPatch, num_turns: int
) -> None:
    """Otherwise `quire serve` would wait for its watch for ever."""
    reader, writer = asyncio.StreamReader(), SimpleNamespace(write=lambda data: None, close=lambda: None)
    connected = asyncio.Event()

    async def connect(*_: object, **options: object) -> tuple[asyncio.StreamReader, SimpleNamespace]:
        connected.set()
        return reader, writer

    monkeypatch.setattr(asyncio, "open_connection", connect)
    check = asyncio.ensure_future(liveness_probe("127.0.0.1:1")(60.0))
    await connected.wait()
    await asyncio.sleep(0)
    reader.feed_data(b"HTTP/1.1 200 OK\r\n")
    for _ in range(num_turns):
        await asyncio.sleep(0)
    if check.cancel():
        with pytest.raises(asyncio.CancelledError):
            await check
    else:
        assert await check
