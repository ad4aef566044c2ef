"""A prompt of 100,000 tokens: messages stay within their bounds, and no step costs more because of the steps before it.

The steps are computed by a fake executor. tests/e2e/test_long_prompts.py computes such prompts.
"""

import asyncio
from dataclasses import replace

from executor.plans.limits import PlanLimits
from executor.plans.plan_size import check_size, max_message_bytes
from quire.resumption import ResumableRequest
from quire.v1 import generation_pb2 as pb
from scheduler.core import Request, Scheduler, SchedulerLimits, SequenceParams, StepResult
from scheduler.engine import plan_wire
from scheduler.servers.bounded_messages import check_cost
from scheduler.servers.grpc_server import OPTIONS
from tests.support.scheduler.engine_rig import RecordingSink, running_engine
from tests.support.scheduler.fake_client import DESCRIPTION, FakeClient
from tests.support.waiting import until

NUM_TOKENS = 100_000
LIMITS = PlanLimits(
    vocab_size=50, max_model_len=131_072, block_size=16, num_blocks=20_001, max_num_seqs=64, max_num_batched_tokens=512
)
LONG = replace(
    DESCRIPTION, max_model_len=131_072, block_size=16, num_blocks=6_301, max_num_seqs=8, max_num_batched_tokens=512
)


FEWER_TOKENS = 3_000
"""Length of prompts that the fake executor computes to the end: it checks the whole context in each step."""


def prompt(num_tokens: int = NUM_TOKENS) -> list[int]:
    return [(1 + i * i) % 50 for i in range(num_tokens)]


def core() -> Scheduler:
    scheduler = Scheduler(SchedulerLimits(64, 512, 131_072), num_blocks=20_001, block_size=16)
    scheduler.executor_attached(1, 20_001)
    return scheduler


def test_the_first_plan_has_the_prompt_and_later_ones_only_what_changes() -> None:
    scheduler = core()
    scheduler.add(Request(1, prompt(), SequenceParams(max_total_tokens=NUM_TOKENS + 2)))
    sizes, num_blocks = [], 0
    while scheduler.num_unfinished_requests:
        plan = scheduler.schedule()
        assert plan is not None
        message = plan_wire.encode_plan(plan, 1)
        check_size(message, LIMITS)
        sizes.append(message.ByteSize())
        num_blocks += len(plan.table_updates) // 3 + sum(len(each.block_table) for each in plan.admissions)
        scheduler.commit(StepResult(1, plan.step_id, [7] * len(scheduler.state.in_flight[-1].sampled)))
    assert num_blocks == 6_251, "each block is sent once"
    assert 4 * NUM_TOKENS < sizes[0] < 4 * NUM_TOKENS + 2_000
    assert max(sizes[1:]) < 2_000


def test_a_plan_that_shares_all_blocks_of_a_long_prompt_is_within_the_bounds() -> None:
    scheduler = core()
    for request_id in (1, 2):
        scheduler.add(Request(request_id, prompt(), SequenceParams(max_total_tokens=NUM_TOKENS + 9)))
        for _ in range(200):
            plan = scheduler.schedule()
            assert plan is not None
            if request_id == 2 and plan.admissions:
                assert len(plan.admissions[0].block_table) == 6_250, "6,249 of them are shared"
                message = plan_wire.encode_plan(plan, 1)
                check_size(message, LIMITS)
                assert message.ByteSize() < max_message_bytes(LIMITS)
            scheduler.commit(StepResult(1, plan.step_id, [7] * len(scheduler.state.in_flight[-1].sampled)))
            if plan.num_tokens < 3:
                break
    assert scheduler.state.counters.num_prefix_hit_tokens == 6_249 * 16


def test_requests_of_long_prompts_and_their_resumptions_fit_into_a_message() -> None:
    """Token ids of a large vocabulary take three bytes each; a resumption has them twice, and the output."""
    max_bytes = dict(OPTIONS)["grpc.max_receive_message_length"]
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[128_000] * 131_000), resumable=True)
    resumable = ResumableRequest(request)
    continuation = pb.Continuation(prompt=request.token_ids, seed=1)
    assert resumable.accept(pb.GenerateResponse(started=pb.Started(continuation=continuation)))
    resumable.accept(pb.GenerateResponse(delta=pb.Delta(token_ids=[128_000] * 72)))
    for each in (request, resumable.next_request()):
        data = each.SerializeToString()
        assert len(data) < max_bytes / 4
        check_cost(data, pb.GenerateRequest.DESCRIPTOR)


async def test_a_cancel_in_the_middle_of_a_long_prompt_frees_its_blocks_with_the_steps_in_flight() -> None:
    client = FakeClient(LONG)
    client.step_s = 0.05
    async with running_engine(client) as engine:
        sink = RecordingSink(Request(engine.new_request_id(), prompt(), SequenceParams(max_total_tokens=100_010)))
        engine.submit(sink.request, sink)
        scheduler = engine.core
        assert scheduler is not None
        await until(lambda: scheduler.state.step_id >= 5)
        num_in_flight, step_id = scheduler.num_in_flight, scheduler.state.step_id
        engine.cancel(sink.request.request_id)
        await until(lambda: not scheduler.num_in_flight)
        assert scheduler.state.step_id == step_id, "no step was planned after the cancel"
        assert num_in_flight <= 2
        assert engine.kv_usage().num_active_blocks == 0


async def test_an_executor_that_is_lost_in_the_middle_of_a_long_prompt_costs_its_client_a_pause() -> None:
    client = FakeClient(replace(LONG, max_num_batched_tokens=32))
    client.step_s = 0.02
    async with running_engine(client) as engine:
        params = SequenceParams(max_total_tokens=FEWER_TOKENS + 3)
        sink = RecordingSink(Request(engine.new_request_id(), prompt(FEWER_TOKENS), params))
        engine.submit(sink.request, sink)
        scheduler = engine.core
        assert scheduler is not None
        await until(lambda: scheduler.state.step_id >= 20, 120)
        client.lose()
        await until(lambda: scheduler.state.epoch == 2 and scheduler.state.step_id >= 1, 120)
        await asyncio.wait_for(sink.done.wait(), 120)
        await sink.check()


async def test_steps_that_take_nearly_the_timeout_are_no_hang() -> None:
    """A prompt of many such steps takes many times as long as the timeout."""
    client = FakeClient(replace(LONG, max_num_batched_tokens=600))
    client.step_s = 0.6
    async with running_engine(client, step_timeout_s=2.0) as engine:
        params = SequenceParams(max_total_tokens=FEWER_TOKENS + 2)
        sink = RecordingSink(Request(engine.new_request_id(), prompt(FEWER_TOKENS), params))
        engine.submit(sink.request, sink)
        await asyncio.wait_for(sink.done.wait(), 120)
        await sink.check()
    assert client.num_streams == 1
