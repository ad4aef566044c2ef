"""A server with a fake runner, and the client's side of its plan streams."""

from __future__ import annotations

import asyncio
import contextlib

import grpc

from executor.config import ExecutorConfig
from quire.executor.v1 import executor_pb2 as pb
from quire.plan_stream import FEATURES, PROTOCOL_VERSION

CONFIG = ExecutorConfig(model="unused", listen_address="127.0.0.1:0", metrics_address="", num_threads=1)


def plan(epoch: int, step_id: int, **fields) -> pb.RunRequest:
    return pb.RunRequest(plan=pb.StepPlan(epoch=epoch, step_id=step_id, **fields))


def opening(instance: str = "one", **fields) -> pb.RunRequest:
    """Returns the first message of the stream of a scheduler."""
    values = {"protocol_version": PROTOCOL_VERSION, "features": FEATURES, "holder": f"scheduler {instance}"}
    return pb.RunRequest(opening=pb.Opening(instance=instance, **(values | fields)))


async def open_stream(stub, instance: str = "one", **fields):
    """Returns a stream with a lease, and the epoch of the lease."""
    call = stub.Run()
    await call.write(opening(instance, **fields))
    answer = await asyncio.wait_for(call.read(), 10)
    assert answer is not grpc.aio.EOF
    return call, answer.lease.epoch


async def status(call) -> tuple[grpc.StatusCode, str]:
    """Reads all results and returns the status of the call."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        while await asyncio.wait_for(call.read(), 10) is not grpc.aio.EOF:
            pass
    return await call.code(), await call.details()
