"""Tests the scheduler process: ready line, drain, exit codes, and that it does not load torch."""

import asyncio
import gc
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest

from quire.addresses import with_port
from quire.signals import EndSignals
from quire.v1 import generation_pb2 as pb
from quire.v1.generation_pb2_grpc import GenerationStub
from scheduler.engine.engine import Engine
from scheduler.main import EXIT_UNFINISHED, _shorten_pauses, _until_done
from scheduler.text.checkpoint import Checkpoint
from tests.support.paths import ROOT
from tests.support.scheduler.engine_rig import engine_options
from tests.support.scheduler.fake_client import FakeClient
from tests.support.scheduler.launcher import SCRIPT, Launcher, request, rest_of


async def test_the_process_serves_and_drains_after_a_signal(launcher: Launcher) -> None:
    process = await launcher.scheduler(await launcher.executor(step_s=0.005))
    await process.ready()
    assert process.addresses["model"] == "fake"
    async with grpc.aio.insecure_channel(process.addresses["grpc"]) as channel:
        stub = GenerationStub(channel)
        running = stub.Generate(request(max_tokens=150))
        await running.read()
        process.signal(signal.SIGTERM)
        refused = stub.Generate(request(max_tokens=1))
        while await refused.code() is grpc.StatusCode.OK:  # the signal may not have arrived yet
            refused = stub.Generate(request(max_tokens=1))
        assert await refused.code() is grpc.StatusCode.UNAVAILABLE
        # The running request still completes.
        messages = await rest_of(running)
        assert sum(len(message.delta.token_ids) for message in messages) == 150
        assert messages[-1].finished.usage.completion_tokens == 150
    assert await process.ended() == (0, False)


async def test_a_second_signal_stops_at_once(launcher: Launcher) -> None:
    process = await launcher.scheduler(await launcher.executor(step_s=0.2))
    await process.ready()
    async with grpc.aio.insecure_channel(process.addresses["grpc"]) as channel:
        running = GenerationStub(channel).Generate(request(max_tokens=1900))
        await running.read()
        process.signal(signal.SIGINT)
        process.signal(signal.SIGTERM)
        assert await process.ended() == (1, False)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest_of(running)
        assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


async def test_a_second_signal_does_not_wait_for_the_prompt_box(launcher: Launcher) -> None:
    process = await launcher.scheduler(await launcher.executor(step_s=0.2))
    await process.ready()
    url = f"http://{process.addresses['http']}/live/completions"
    body = {"text": "hello fox", "stopping": {"max_tokens": 1900, "ignore_eos": True}}
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        await response.content.readline()
        process.signal(signal.SIGINT)
        process.signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            assert await process.ended() == (1, False)


async def test_drain_has_a_time_limit(launcher: Launcher) -> None:
    process = await launcher.scheduler(await launcher.executor(step_s=0.2), drain_timeout_s=0.3)
    await process.ready()
    async with grpc.aio.insecure_channel(process.addresses["grpc"]) as channel:
        running = GenerationStub(channel).Generate(request(max_tokens=1900))
        await running.read()
        process.signal(signal.SIGTERM)
        assert await process.ended() == (1, False)


async def test_an_engine_that_was_cancelled_from_elsewhere_has_failed(caplog: pytest.LogCaptureFixture) -> None:
    running = asyncio.create_task(asyncio.Event().wait())
    running.cancel()
    engine = Engine(FakeClient(), engine_options())  # type: ignore[arg-type]
    exit_code = await _until_done(engine, running, EndSignals(), drain_timeout_s=1.0, on_signal=lambda: None)
    assert exit_code == EXIT_UNFINISHED
    assert "the engine has failed" in caplog.text


def run_until_exit(**config: Any) -> subprocess.CompletedProcess[str]:
    values = {
        "listen": "127.0.0.1:0",
        "http_listen": "127.0.0.1:0",
        "executor": "127.0.0.1:1",
        "log_level": "error",
    }
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(values | config)],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("field", ["listen", "http_listen"])
def test_an_address_in_use_is_reported_with_exit_code_3(checkpoint: Checkpoint, field: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = run_until_exit(model=str(checkpoint.directory), **{field: address})
    assert ended.returncode == 3
    assert ended.stderr == f"quire scheduler: cannot listen on {address}: Address already in use\n"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model": "/no/such/model"}, "no such directory, and no hub id"),
        ({"model": "TMP"}, "has no tokenizer.json"),
        ({"model": "CHECKPOINT", "listen": "192.0.2.1:1", "allow_anonymous": True}, "cannot listen on 192.0.2.1:1"),
    ],
)
def test_a_bad_configuration_is_reported_with_exit_code_2(
    config: dict[str, Any], words: str, checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> None:
    paths = {"TMP": str(tmp_path_factory.mktemp("empty")), "CHECKPOINT": str(checkpoint.directory)}
    ended = run_until_exit(**config | {"model": paths.get(config["model"], config["model"])})
    assert ended.returncode == 2
    assert words in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_full_collections_of_garbage_are_rare_and_leave_out_the_objects_of_the_start() -> None:
    interval_s, thresholds = sys.getswitchinterval(), gc.get_threshold()
    try:
        _shorten_pauses()
        assert sys.getswitchinterval() < interval_s
        assert gc.get_freeze_count() > 10_000
        assert gc.get_threshold()[:2] == thresholds[:2]
        assert gc.get_threshold()[2] > thresholds[2]
    finally:
        sys.setswitchinterval(interval_s)
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def test_importing_the_scheduler_does_not_load_torch() -> None:
    script = (
        "import sys, scheduler.main; "
        "print(sorted({'torch', 'transformers', 'numba', 'huggingface_hub', 'executor', 'kernels'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


async def serving(channel: grpc.aio.Channel) -> None:
    """Waits until the scheduler says that it serves. It listens before it has an executor."""
    stub, state = GenerationStub(channel), None
    while state != pb.SERVER_STATE_SERVING:
        with suppress(grpc.aio.AioRpcError):  # UNAVAILABLE until an executor has described itself
            state = (await stub.GetServerInfo(pb.GetServerInfoRequest(), wait_for_ready=True)).state
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("how", ["full", "left"])
async def test_a_scheduler_without_a_reader_of_its_output_serves_and_drains(launcher: Launcher, how: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    addresses = {name: with_port("127.0.0.1:0") for name in ("listen", "http_listen")}
    with open("/dev/full", "w", encoding="utf-8") as full, os.fdopen(writer, "w") as left:  # noqa: ASYNC230
        stdout = full if how == "full" else left
        process = await launcher.scheduler(await launcher.executor(), stdout=stdout, **addresses)
    async with grpc.aio.insecure_channel(addresses["listen"]) as channel:
        await serving(channel)
        messages = await rest_of(GenerationStub(channel).Generate(request(max_tokens=5), wait_for_ready=True))
    assert messages[-1].finished.usage.completion_tokens == 5
    process.signal(signal.SIGTERM)
    assert await process.exit_code() == 0


async def test_a_scheduler_without_file_descriptors_keeps_its_streams_and_recovers(launcher: Launcher) -> None:
    """Every descriptor that the process may have is taken by connections, while a stream runs."""
    addresses = {name: with_port("127.0.0.1:0") for name in ("listen", "http_listen")}
    limited = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
    process = await launcher.scheduler(await launcher.executor(step_s=0.01), prelude=limited, **addresses)
    async with grpc.aio.insecure_channel(addresses["listen"]) as channel:
        await serving(channel)
        running = GenerationStub(channel).Generate(request(max_tokens=150))
        await running.read()
        host, port = addresses["listen"].rsplit(":", 1)
        taken = [await asyncio.open_connection(host, int(port)) for _ in range(100)]
        messages = await rest_of(running)
        assert sum(len(message.delta.token_ids) for message in messages) == 150
        for _, writer in taken:
            writer.close()
        again = await rest_of(GenerationStub(channel).Generate(request(max_tokens=5)))
        assert again[-1].finished.usage.completion_tokens == 5
    async with grpc.aio.insecure_channel(addresses["listen"]) as another:
        await asyncio.wait_for(serving(another), 30)
    process.signal(signal.SIGTERM)
    assert await process.exit_code() == 0
