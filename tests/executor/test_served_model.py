"""The service with a real model: its tokens over gRPC, and the time at which its pool takes memory."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import sys
from dataclasses import replace

import grpc
import numpy as np
import pytest

from executor.config import ExecutorConfig
from executor.loading import load_model
from executor.plans.plan import Admission, SequenceParams, StepPlan
from executor.server import Server
from quire.executor.v1 import executor_pb2 as pb
from quire.executor.v1.executor_pb2_grpc import ExecutorStub
from tests.support.executor.messages import plan_message, read
from tests.support.executor.plan_driver import ints, tuples
from tests.support.executor.served import open_stream, status

CONFIG = ExecutorConfig(model="unused", listen_address="127.0.0.1:0", metrics_address="", num_threads=1)


async def test_a_real_model_is_served_over_grpc(checkpoint) -> None:
    source = checkpoint("llama")
    config = replace(
        CONFIG, model=str(source.directory), kernels="reference", device="cpu", block_size=4, num_blocks=20
    )
    server = Server(config, load_model(config, lambda line: None))
    address = await server.start()
    prompt = source.prompt(6)
    first = StepPlan(
        1,
        1,
        admissions=(Admission(3, ints(*prompt), 0, ints(7, 3, 9), SequenceParams(max_total_tokens=11)),),
        row_counts=tuples(2, (3, 6)),
    )
    plans = [first, StepPlan(1, 2, row_counts=tuples(2, (3, 1))), *(StepPlan(1, step) for step in (3, 4, 5))]
    async with grpc.aio.insecure_channel(address) as channel:
        call, _ = await open_stream(ExecutorStub(channel))
        for message in map(plan_message, plans):
            await call.write(pb.RunRequest(plan=message))
        results = [await read(call) for _ in plans]
        call.cancel()
    await server.stop()
    assert [int(np.frombuffer(result.token_ids, "<i4")[0]) for result in results] == source.greedy(prompt, 5)
    assert [result.end_reasons for result in results] == [b"", b"", b"", b"", bytes([pb.END_REASON_LENGTH])]


async def test_the_next_lease_cannot_read_the_kv_of_the_last_one(checkpoint) -> None:
    """The attack: blocks of a finished request, declared as computed. The next honest plan is served."""
    source = checkpoint("llama")
    config = replace(
        CONFIG, model=str(source.directory), kernels="reference", device="cpu", block_size=4, num_blocks=20
    )
    server = Server(config, load_model(config, lambda line: None))
    prompt = source.prompt(6)

    def admitted(epoch: int, num_computed: int) -> pb.RunRequest:
        params = SequenceParams(max_total_tokens=11)
        admission = Admission(3, ints(*prompt), num_computed, ints(7, 3, 9), params)
        counts = tuples(2, (3, 6 - num_computed))
        return pb.RunRequest(plan=plan_message(StepPlan(epoch, 1, admissions=(admission,), row_counts=counts)))

    async with grpc.aio.insecure_channel(await server.start()) as channel:
        stub = ExecutorStub(channel)
        for num_computed in (0, 5, 4, 1, 0):
            call, epoch = await open_stream(stub)
            await call.write(admitted(epoch, num_computed))
            if num_computed:
                code, details = await status(call)
                assert code is grpc.StatusCode.INVALID_ARGUMENT
                assert "block 7 counts as computed, but this lease has not written" in details
            else:
                assert np.frombuffer((await read(call)).token_ids, "<i4").tolist() == source.greedy(prompt, 1)
                call.cancel()
    await server.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="memory is only populated ahead on Linux")
async def test_the_pool_is_populated_while_idle(checkpoint) -> None:
    config = replace(
        CONFIG, model=str(checkpoint("llama").directory), kernels="reference", device="cpu", block_size=16,
        num_blocks=4000,
    )  # fmt: skip
    model = load_model(config, lambda line: None)
    pool = model.runner.model.pool
    assert pool.nbytes > 16 << 20
    server = Server(config, model)
    assert num_resident_pages(pool) < 10
    await server.start()
    for _ in range(3000):
        if num_resident_pages(pool) == pool.nbytes // mmap.PAGESIZE:
            break
        await asyncio.sleep(0.02)
    else:
        pytest.fail("the pool takes no memory")
    await server.stop()
    assert not pool.any()


def num_resident_pages(tensor) -> int:
    """Counts the resident pages that lie within a tensor."""
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    num_pages = (tensor.data_ptr() + tensor.nbytes - start) // mmap.PAGESIZE
    flags = np.zeros(num_pages, np.uint8)
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    size = ctypes.c_size_t(num_pages * mmap.PAGESIZE)
    assert mincore(ctypes.c_void_p(start), size, ctypes.c_void_p(flags.ctypes.data)) == 0
    return int((flags & 1).sum())
