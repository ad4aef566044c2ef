"""Children that hang are killed and restarted."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from quire.addresses import with_port
from quire.cli.child import ChildSpec
from quire.cli.restarts import RestartPolicy
from quire.cli.supervisor import Supervisor
from quire.cli.watch import health_probe, liveness_probe, replace_when_hung
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
async def watched(program: str, *, is_serving: bool = True) -> AsyncIterator[Watched]:
    it = Watched(program)
    it.is_serving = is_serving

    async def ready() -> bool:
        return bool(it.lines)

    async with it.supervisor:
        await it.supervisor.until_ready(ready)
        watch = asyncio.create_task(replace_when_hung(it.supervisor, "executor", it.probe, 0.02))
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
            "executor was killed by SIGKILL; restarting it in 0.01 s",
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


async def test_up_to_three_failed_checks_are_tolerated() -> None:
    async with watched(READY) as it:
        answers = [True, False, False, False] * 5

        async def probe(timeout_s: float) -> bool:
            return answers.pop(0) if answers else True

        watch = asyncio.create_task(replace_when_hung(it.supervisor, "executor", probe, 0.02))
        await until(lambda: not answers)
        assert it.lines == ["ready at an address"]
        watch.cancel()


async def test_an_address_without_a_server_is_not_serving() -> None:
    async with health_probe(with_port("127.0.0.1:0")) as is_serving:
        assert await is_serving(5.0) is False


async def answer(reply: bytes, http_address: str) -> asyncio.Server:
    """Starts a server that answers every connection with `reply`; an empty reply is never sent."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET /healthz ")
        if reply:
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
    ):
        server = await answer(reply, address)
        assert await is_alive(5.0) is expected
        server.close()
    server = await answer(b"", address)  # accepts, and is silent like a stopped process
    assert await is_alive(0.05) is False
    server.close()


async def test_a_process_that_was_alive_without_saying_ready_is_replaced() -> None:
    async with watched(LOADING) as it:
        await it.checked(2)
        it.is_serving = False
        await until(lambda: len(it.lines) >= 3)
        assert it.lines[1] == "executor has not served for 0.02 s: killed"
