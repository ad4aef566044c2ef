"""Tests the scheduler's side of the plan stream over gRPC, with the real executor and with an invalid one."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import pytest

from executor.config import ExecutorConfig
from executor.server import Server
from quire.executor.v1 import executor_pb2 as pb
from quire.executor.v1.executor_pb2_grpc import ExecutorServicer, add_ExecutorServicer_to_server
from scheduler.core import ExecutorLost, ResultMismatch, StepPlan, StepResult
from scheduler.engine import plan_wire
from scheduler.engine.executor_client import ExecutorClient, PlanStream
from tests.support.executor.fake_runner import FakeRunner, loaded
from tests.support.waiting import WAIT_S, until

NUM_STREAMS = 50
NUM_PLANS = 10

LARGE_PLAN = StepPlan(1, 1, retired_slots=[0] * 500_000)


async def error_of_a_stream(client: ExecutorClient, epoch: int) -> ExecutorLost:
    """Returns the error that ends a stream whose first plan is refused while the next ones are being written."""
    has_ended = asyncio.Event()
    incarnation = (await client.describe(WAIT_S)).incarnation
    stream = await client.open_stream(has_ended.set, epoch, incarnation, WAIT_S)
    with suppress(ExecutorLost):
        for step_id in range(1, NUM_PLANS + 1):
            await stream.send(StepPlan(epoch, step_id, retired_slots=[7]))
    await asyncio.wait_for(has_ended.wait(), WAIT_S)
    try:
        stream.take()
    except ExecutorLost as error:
        return error
    finally:
        await stream.close()
    raise AssertionError("a result of a plan that was refused")


async def test_the_reason_of_a_refusal_is_known_while_the_next_plans_are_being_written() -> None:
    config = ExecutorConfig(model="unused", listen_address="127.0.0.1:0", metrics_address="", num_threads=1)
    server = Server(config, loaded(FakeRunner()))
    client = ExecutorClient(await server.start())
    try:
        errors = [await error_of_a_stream(client, epoch) for epoch in range(1, NUM_STREAMS + 1)]
    finally:
        await client.close()
        await server.stop()
    reason = "PlanRejected: the executor refused a plan: step 1: retired_slots: out of range"
    assert Counter(f"{type(error).__name__}: {error}" for error in errors) == {reason: NUM_STREAMS}


class InvalidExecutor(ExecutorServicer):
    """Grants a lease, reads no plan, and sends an invalid result when `sends` is set."""

    def __init__(self) -> None:
        self.sends = asyncio.Event()

    async def Run(self, request_iterator: object, context: object) -> AsyncIterator[pb.RunResponse]:  # type: ignore[override]  # noqa: N802
        yield pb.RunResponse(lease=pb.Lease(epoch=5))
        await self.sends.wait()
        yield pb.RunResponse(result=pb.StepResult(epoch=5, step_id=1, token_ids=b"abc"))
        await asyncio.Event().wait()


@asynccontextmanager
async def invalid_executor() -> AsyncIterator[tuple[InvalidExecutor, PlanStream]]:
    servicer, server = InvalidExecutor(), grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
    add_ExecutorServicer_to_server(servicer, server)
    client = ExecutorClient(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    await server.start()
    stream = await client.open_stream(lambda: None, epoch=1, incarnation="", timeout_s=10)
    try:
        yield servicer, stream
    finally:
        await stream.close()
        await client.close()
        await server.stop(0)


async def write(stream: PlanStream) -> None:
    """Writes until a write waits, because the executor does not read."""
    while True:
        await stream.send(LARGE_PLAN)


async def test_an_invalid_result_ends_the_stream_without_cancelling_the_writer() -> None:
    async with invalid_executor() as (executor, stream):
        writing = asyncio.create_task(write(stream))
        await asyncio.wait({writing}, timeout=0.5)
        assert not writing.done()
        executor.sends.set()
        with pytest.raises(ResultMismatch, match="3 bytes of token ids"):
            await asyncio.wait_for(writing, 10)


async def test_a_writer_that_is_cancelled_ends_with_its_cancellation() -> None:
    async with invalid_executor() as (_, stream):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await write(stream)


async def test_a_result_that_memory_is_too_short_for_ends_its_stream_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, counted: Callable[[], dict[str, int]]
) -> None:
    def too_large(message: pb.StepResult, epoch: int) -> StepResult:
        raise MemoryError

    monkeypatch.setattr(plan_wire, "decode_result", too_large)
    async with invalid_executor() as (executor, stream):
        executor.sends.set()
        await until(lambda: stream._error is not None)
        with pytest.raises(ExecutorLost, match="a result could not be read: MemoryError"):
            stream.take()
    assert "Traceback" in caplog.text
    assert counted() == {"result": 1}


# --- an address in a file -------------------------------------------------------------------------------------------


@asynccontextmanager
async def fake_executors(num: int) -> AsyncIterator[list[Server]]:
    config = ExecutorConfig(model="unused", listen_address="127.0.0.1:0", metrics_address="", num_threads=1)
    servers = [Server(config, loaded(FakeRunner())) for _ in range(num)]
    try:
        yield servers
    finally:
        for server in servers:
            await server.stop()


async def test_an_executor_is_found_at_the_address_that_a_file_holds_now(tmp_path: Path) -> None:
    path = tmp_path / "executor"
    async with fake_executors(2) as servers:
        addresses = [await server.start() for server in servers]
        client = ExecutorClient(f"file:{path}")
        found = []
        for address in (*addresses, addresses[0]):
            path.write_text(f"{address}\n")
            found.append((await client.find(10)).incarnation)
            assert client.address == address
        assert found[0] == found[2] != found[1]
        await client.close()


async def test_a_search_at_an_old_address_ends_when_the_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "executor"
    path.write_text("127.0.0.1:1")
    client = ExecutorClient(f"file:{path}")
    finding = asyncio.create_task(client.find(300))
    await asyncio.sleep(0.1)
    path.write_text("127.0.0.1:2")
    with pytest.raises(ExecutorLost, match="has left"):
        await asyncio.wait_for(finding, 60)
    await client.close()


@pytest.mark.parametrize("text", [None, "", "nowhere", "a:1\nb:1", "\0"])
async def test_a_file_without_an_address_is_a_lost_executor(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "executor"
    if text is not None:
        path.write_text(text)
    client = ExecutorClient(f"file:{path}")
    with pytest.raises(ExecutorLost, match=str(path)):
        await client.find(1)
    await client.close()
