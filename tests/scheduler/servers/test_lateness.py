"""A request that would miss its deadline is refused before anything else is done for it."""

import time
from math import inf

import grpc
from google.rpc.error_details_pb2 import RetryInfo

from quire.v1 import generation_pb2 as pb
from scheduler.core import DEFAULT_TENANT, QueueFull
from tests.support.scheduler.fake_engine import FakeEngine
from tests.support.scheduler.generation_calls import details, failure, text_request
from tests.support.scheduler.servers import Servers

INVALID = pb.SamplingParams(temperature=-1.0)


async def test_a_request_that_would_be_late_is_neither_checked_nor_tokenised(servers: Servers) -> None:
    engine = FakeEngine()
    engine.lateness = QueueFull("the request would miss its deadline", 7.5)
    served = await servers.start(engine)
    error = await failure(served, text_request(sampling=INVALID), timeout=30.0)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    retry = RetryInfo()
    assert details(error).details[0].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 7500


async def test_the_engine_is_told_the_deadline_the_bound_and_the_priority(servers: Servers) -> None:
    served = await servers.start(engine := FakeEngine())
    await failure(
        served, text_request(sampling=INVALID, stopping=pb.StoppingParams(max_tokens=7), priority=-2), timeout=30.0
    )
    await failure(served, text_request(sampling=INVALID))
    (tenant, deadline_s, *claimed), without = engine.checked_deadlines
    assert (tenant, claimed) == (DEFAULT_TENANT, [7, -2])
    assert deadline_s is not None
    assert 0 < deadline_s - time.monotonic() < 31  # gRPC rounds the time left up
    assert without == (DEFAULT_TENANT, None, inf, 0)


async def test_a_stream_that_came_back_is_read_first(servers: Servers) -> None:
    """It may be complete, and then it waits for nothing."""
    engine = FakeEngine()
    engine.lateness = QueueFull("the request would miss its deadline")
    served = await servers.start(engine)
    resume = pb.Resumption(sequences=[pb.ResumedSequence(index=0)])
    error = await failure(served, text_request(sampling=INVALID, resume=resume))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
