"""Tests that the engine's step traces have the load of each step, also after an executor was lost."""

import asyncio

import numpy as np
import pytest

from executor.plans.plan import StepOutput, StepTimings
from executor.plans.plan_wire import output_to_message
from quire import messages
from quire.v1 import admin_pb2
from scheduler.engine.plan_wire import decode_timings
from scheduler.engine.step_trace import StepTrace
from scheduler.servers.admin_server import step_trace_message
from tests.support.scheduler.engine_rig import running_engine, submit
from tests.support.scheduler.fake_client import FakeClient
from tests.support.waiting import until


async def test_a_request_is_traced_as_a_prompt_and_decodes_with_growing_contexts() -> None:
    async with running_engine(FakeClient()) as engine:
        await submit(engine, [1, 2, 3], 4).check()
        steps = list(engine.traces)
    assert [(step.num_sequences, step.num_tokens, step.num_decodes) for step in steps] == [(1, 3, 0)] + [(1, 1, 1)] * 3
    assert [step.num_decode_pairs for step in steps] == [0, 4, 5, 6]
    assert [step.num_prefill_pairs for step in steps] == [1 + 2 + 3, 0, 0, 0]


async def test_the_loads_start_again_with_a_new_executor() -> None:
    """The running request is computed again, which counts as a prompt."""
    client = FakeClient()
    async with running_engine(client) as engine:
        sink = submit(engine, [1, 2, 3], 150)
        await asyncio.wait_for(sink.first_token.wait(), 10)
        client.lose()
        await until(lambda: client.num_streams == 2)
        await sink.check()
        steps = [step for step in engine.traces if step.epoch == max(step.epoch for step in engine.traces)]
    first = steps[0]
    assert (first.num_decodes, first.num_sequences) == (0, 1)
    assert first.num_prefill_pairs == first.num_tokens * (first.num_tokens + 1) // 2
    assert [step.num_decode_pairs for step in steps[1:]] == list(range(first.num_tokens + 1, 153))


@pytest.mark.parametrize(("prepare_overlaps", "busy_ns"), [(False, 7 + 20 + 3), (True, 20 + 3)])
def test_busy_time_is_the_same_on_the_executor_and_at_the_client(prepare_overlaps: bool, busy_ns: int) -> None:
    """Timings travel from the executor to the client over both protocols."""
    timings = StepTimings(7, 20, 3, prepare_overlaps=prepare_overlaps)
    output = StepOutput(1, 1, np.zeros(0, np.int32), np.zeros(0, np.uint8), timings)
    trace = StepTrace(1, 1, 1, 1, 1, timings=decode_timings(output_to_message(output)))
    (seen,) = messages.step_trace(admin_pb2.GetStepTraceResponse(steps=[step_trace_message(trace)]))
    assert timings.busy_ns == trace.timings.busy_ns == seen.busy_ns == busy_ns
