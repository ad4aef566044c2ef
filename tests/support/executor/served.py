"""A server with a fake runner, and the client's side of its plan streams."""

from __future__ import annotations

import asyncio
import contextlib

import grpc

from executor.config import ExecutorConfig
from quire.executor.v1 import executor_pb2 as pb

CONFIG = ExecutorConfig(model="unused", listen_address="127.0.0.1:0", metrics_address="", num_threads=1)


def plan(epoch: int, step_id: int, **fields) -> pb.StepPlan:
    return pb.StepPlan(epoch=epoch, step_id=step_id, **fields)


async def status(call) -> tuple[grpc.StatusCode, str]:
    """Reads all results and returns the status of the call."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        while await asyncio.wait_for(call.read(), 10) is not grpc.aio.EOF:
            pass
    return await call.code(), await call.details()
