"""The parts of the recovery measurement that need no services."""

import asyncio

import grpc.aio
import psutil
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from bench.overhead.recovery import (
    Recomputation,
    Recovery,
    RecoveryError,
    Watch,
    child,
    measure_recomputation,
    recomputation_row,
    row,
)
from quire.addresses import with_port


async def server(address: str) -> tuple[grpc.aio.Server, health.aio.HealthServicer]:
    started, servicer = grpc.aio.server(), health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, started)
    started.add_insecure_port(address)
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    await started.start()
    return started, servicer


async def test_watch_reports_when_a_server_dies() -> None:
    address = with_port("127.0.0.1:0")
    watch = Watch(address)
    following = asyncio.create_task(watch.follow())
    async with asyncio.timeout(60):
        first, servicer = await server(address)
        await watch.until(True)
        await servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        await watch.until(False)
        await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
        await watch.until(True)
        await first.stop(0)
        await watch.until(False)
        second, _ = await server(address)
        await watch.until(True)
    following.cancel()
    await second.stop(0)


def test_missing_service_is_an_error() -> None:
    with pytest.raises(RecoveryError, match="the executor is not running"):
        child(psutil.Process(), "executor")


def test_row_shows_times_and_gap() -> None:
    stopped = Recovery("executor", "SIGSTOP", 16, 10.5, 14.25, 14.5)
    assert row(stopped).split() == ["executor", "SIGSTOP", "16", "10.50", "s", "14.25", "s", "14.50", "s"]
    restarted = Recovery("scheduler", "SIGKILL", 0, 0.01, 1.5, None)
    assert row(restarted).split() == ["scheduler", "SIGKILL", "0", "0.01", "s", "1.50", "s", "-"]


def test_row_of_a_recomputation_shows_tokens() -> None:
    words = recomputation_row(Recomputation(("scheduler",), 16, 5_000, 100, 16)).split()
    assert words[:2] == ["scheduler", "SIGKILL"]
    assert [word for word in words if word[0].isdigit()] == ["16", "5,000", "100", "16"]


@pytest.mark.exhaustive
async def test_an_executor_that_survives_saves_all_but_the_last_block() -> None:
    kept, lost = [each async for each in measure_recomputation(2)]
    assert kept.most_computed_tokens <= 16
    assert lost.num_computed_tokens == lost.num_known_tokens
