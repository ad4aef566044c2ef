"""The gateway as a process: its ready line, its exit codes, and its end."""

import asyncio
import json
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from quire.addresses import with_port
from tests.support.gateway.fake_scheduler import MODEL, FakeScheduler
from tests.support.gateway.rig import content, parsed_events
from tests.support.paths import ROOT
from tests.support.waiting import until

LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (%d, %d))"

SCRIPT = """
import json, sys
from gateway.config import GatewayConfig
from gateway.main import run
code = run(GatewayConfig.from_dict(json.loads(sys.argv[1])))
assert not {"torch", "scheduler", "executor", "tokenizers"} & set(sys.modules)
sys.exit(code)
"""


class Gateway:
    """A gateway process, which is killed at the end of the context."""

    def __init__(self, prefix: str = "", **config: Any) -> None:
        self._script = f"{prefix}\n{SCRIPT}"
        self._config = {"listen": "127.0.0.1:0"} | config

    async def __aenter__(self) -> "Gateway":
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", self._script, json.dumps(self._config), cwd=ROOT,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()

    async def ready(self) -> str:
        """Returns the address in the ready line."""
        assert self.process.stdout is not None
        line = (await asyncio.wait_for(self.process.stdout.readline(), 60)).decode()
        assert line.startswith("ready openai="), line
        return line.strip().partition("=")[2]

    async def ended(self) -> tuple[int, str]:
        """Returns the exit code and the log."""
        _, log = await asyncio.wait_for(self.process.communicate(), 60)
        assert self.process.returncode is not None
        return self.process.returncode, log.decode()


async def answer(address: str) -> list[Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with aiohttp.ClientSession(f"http://{address}") as http:
        async with http.post("/v1/chat/completions", json=body) as response:
            return parsed_events(await response.text())


async def test_the_reason_for_its_end_is_the_last_line_of_the_log() -> None:
    fake = FakeScheduler()
    await fake.start()
    async with Gateway(scheduler=fake.address) as first:
        taken = await first.ready()
        async with Gateway(scheduler=fake.address, listen=taken) as second:
            code, log = await second.ended()
    await fake.stop()
    assert code == 3
    assert log.splitlines()[-1].startswith(f"quire gateway: cannot listen on {taken}: ")


async def test_sigterm_drains() -> None:
    fake = FakeScheduler()
    await fake.start()
    fake.words_each, fake.step_s = 50, 0.01
    async with Gateway(scheduler=fake.address) as gateway:
        answering = asyncio.create_task(answer(await gateway.ready()))
        await until(lambda: fake.opened)
        gateway.process.send_signal(signal.SIGTERM)
        assert content(await answering).endswith("w49 ")
        assert (await gateway.ended())[0] == 0
    await fake.stop()


async def test_sigterm_before_a_scheduler_has_answered_is_no_failure() -> None:
    async with Gateway(listen=with_port("0.0.0.0:0"), scheduler=with_port("127.0.0.1:0")) as gateway:
        assert gateway.process.stderr is not None
        while b"listening begins when a scheduler answers" not in await gateway.process.stderr.readline():
            pass
        gateway.process.send_signal(signal.SIGTERM)
        code, log = await gateway.ended()
        assert code == 0, log
        assert "everyone could call" not in log


async def test_connections_leave_descriptors_for_schedulers() -> None:
    fake = FakeScheduler()
    await fake.start()
    async with Gateway(prefix=LIMIT % (256, 1024), scheduler=fake.address) as gateway:
        address = await gateway.ready()
        limit, _ = resource.prlimit(gateway.process.pid, resource.RLIMIT_NOFILE)
        assert limit == 1024, "raised as far as it can be"
        assert content(await answer(address))
    async with Gateway(prefix=LIMIT % (64, 64), scheduler=fake.address) as gateway:
        address = await gateway.ready()
        host, port = address.split(":")
        held = [await asyncio.open_connection(host, int(port)) for _ in range(60)]
        for reader, _ in held[25:]:
            assert await asyncio.wait_for(reader.read(), 60) == b""
        # Those that send nothing are closed later, too: then it would be all of them.
        assert not any(reader.at_eof() for reader, _ in held[:25]), "25 are kept, of 64 descriptors"
        for _, writer in held:
            writer.close()
        await until(lambda: is_answered(address))
    await fake.stop()


async def is_answered(address: str) -> bool:
    try:
        return bool(content(await answer(address)))
    except aiohttp.ClientError:
        return False


async def test_a_second_signal_breaks_streams_off() -> None:
    fake = FakeScheduler()
    await fake.start()
    fake.words_each, fake.step_s = 100_000, 0.01
    async with Gateway(scheduler=fake.address) as gateway:
        answering = asyncio.create_task(answer(await gateway.ready()))
        await until(lambda: fake.opened)
        gateway.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.3)
        gateway.process.send_signal(signal.SIGTERM)
        code, log = await gateway.ended()
        assert code == 1
        assert "unfinished" in log
        with pytest.raises(aiohttp.ClientError):
            await answering
    await fake.stop()


async def test_a_taken_address_is_exit_code_3() -> None:
    fake = FakeScheduler()
    await fake.start()
    async with Gateway(listen=fake.address, scheduler=fake.address) as gateway:
        code, log = await gateway.ended()
    assert code == 3
    assert fake.address in log
    await fake.stop()


@pytest.mark.parametrize(("key", "code"), [(None, 2), ("quire-key", None)])
async def test_other_machines_may_call_only_if_schedulers_ask_for_keys(key: str | None, code: int | None) -> None:
    fake = FakeScheduler(key)
    await fake.start()
    async with Gateway(listen=with_port("0.0.0.0:0"), scheduler=fake.address) as gateway:
        if code is None:
            await gateway.ready()
        else:
            assert (await gateway.ended())[0] == code
    await fake.stop()


async def test_the_schedulers_may_change_while_it_runs(tmp_path: Path) -> None:
    path = tmp_path / "schedulers"
    first, second = FakeScheduler(), FakeScheduler()
    for fake in (first, second):
        await fake.start()
    path.write_text(first.address)
    async with Gateway(schedulers_file=str(path)) as gateway:
        address = await gateway.ready()
        await answer(address)
        path.write_text(second.address)

        async def has_moved() -> bool:
            await answer(address)
            return bool(second.opened)

        await until(has_moved)
        await first.stop()
        num_first = len(first.opened)
        assert content(await answer(address)) == "w0 w1 w2 "
        assert len(first.opened) == num_first
    await second.stop()


@pytest.mark.parametrize("text", [None, "", "nowhere"])
async def test_a_file_of_schedulers_that_cannot_be_used_is_exit_code_2(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "schedulers"
    if text is not None:
        path.write_text(text)
    async with Gateway(schedulers_file=str(path)) as gateway:
        code, log = await gateway.ended()
    assert code == 2
    assert str(path) in log


async def test_missing_tls_files_are_exit_code_2() -> None:
    async with Gateway(tls_certificate="/nowhere.pem", tls_key="/nowhere.key", scheduler="127.0.0.1:9") as gateway:
        code, log = await gateway.ended()
    assert code == 2
    assert "/nowhere.pem" in log
