"""Metrics count each event once, when it happens."""

import asyncio
import itertools
import time
from typing import TYPE_CHECKING, cast

import pytest
from prometheus_client.core import Exemplar
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics_families
from prometheus_client.parser import text_string_to_metric_families

from quire.histogram import Histogram, exemplar_labels
from quire.v1 import generation_pb2 as pb
from scheduler.core import (
    FinishReason,
    Request,
    Scheduler,
    SchedulerLimits,
    SequenceParams,
    StepPlan,
    StepResult,
    block_map,
)
from scheduler.engine.engine import ServerState
from scheduler.live.snapshot import take_snapshot
from scheduler.telemetry.limits import NUM_LIMITED
from scheduler.telemetry.metrics import OPEN_METRICS, TEXT, SchedulerMetrics
from tests.support.core.letter_tokens import make_request
from tests.support.core.small_harness import build_harness
from tests.support.scheduler.fake_engine import FakeEngine
from tests.support.scheduler.servers import Servers

if TYPE_CHECKING:
    from scheduler.engine.engine import Engine


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def samples(metrics: SchedulerMetrics) -> dict[str, float]:
    """Returns samples by name and labels, without model_name."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = [
                value
                for name, value in sorted(sample.labels.items())
                if name not in ("model_name", "service", "version")
            ]
            found["/".join([sample.name, *labels])] = sample.value
    return found


def exemplars(metrics: SchedulerMetrics, name: str) -> dict[str, Exemplar]:
    """Returns the exemplars of a histogram by the bound of their bucket."""
    content_type, page = metrics.answer(OPEN_METRICS)
    assert content_type == OPEN_METRICS
    return {
        sample.labels["le"]: sample.exemplar
        for family in open_metrics_families(page.decode())
        if family.name == name
        for sample in family.samples
        if sample.exemplar
    }


async def metrics_of_fake_engine(clock: Clock) -> SchedulerMetrics:
    metrics = SchedulerMetrics(clock)
    metrics.engine = cast("Engine", FakeEngine())
    return metrics


async def test_request_is_measured_from_arrival_to_end() -> None:
    clock = Clock()
    metrics = await metrics_of_fake_engine(clock)
    request = metrics.request(num_sequences=2, arrival_s=clock.now_s)
    clock.now_s += 1
    request.started(num_prompt_tokens=10, num_cached_tokens=4)
    clock.now_s += 2
    request.tokens(0, 1)
    request.tokens(1, 1)
    clock.now_s += 4
    request.tokens(0, 1)
    request.finished(0, FinishReason.EOS, 2)
    clock.now_s += 8
    request.tokens(1, 2)
    request.finished(1, FinishReason.LENGTH, 3)
    request.ended(FinishReason.CANCELLED)  # ignored, because the request has ended
    found = samples(metrics)
    assert found["quire_prompt_tokens_total/cached"] == 4
    assert found["quire_prompt_tokens_total/computed"] == 6
    assert found["quire_generation_tokens_total"] == 5
    assert found["quire_requests_finished_total/length"] == 1
    assert found["quire_requests_finished_total/eos"] == found["quire_requests_finished_total/cancelled"] == 0
    sums = {
        "quire_request_queue_time_seconds": 1,
        "quire_request_prefill_time_seconds": 2,
        "quire_time_to_first_token_seconds": 3,
        "quire_request_decode_time_seconds": 12,
        "quire_e2e_request_latency_seconds": 15,
        "quire_inter_token_latency_seconds": 4 + 12,
        "quire_time_per_output_token_seconds": 4 + 6,
        "quire_request_prompt_tokens": 10,
        "quire_request_generation_tokens": 5,
    }
    assert {name: found[f"{name}_sum"] for name in sums} == sums
    assert found["quire_inter_token_latency_seconds_count"] == 3
    assert found["quire_time_to_first_token_seconds_count"] == 1


async def test_request_without_tokens_is_counted_as_ended() -> None:
    clock = Clock()
    metrics = await metrics_of_fake_engine(clock)
    metrics.request(1, clock.now_s).ended(FinishReason.CANCELLED)
    found = samples(metrics)
    assert found["quire_requests_finished_total/cancelled"] == 1
    assert found["quire_time_to_first_token_seconds_count"] == 0
    assert found["quire_request_decode_time_seconds_count"] == 0


def test_buckets_are_cumulative() -> None:
    histogram = Histogram((1, 2))
    for value in (0.5, 1, 1.5, 2, 2.5):
        histogram.observe(value)
    histogram.observe(0.25, times=4)
    assert histogram.cumulative() == [("1.0", 6.0), ("2.0", 8.0), ("+Inf", 9.0)]
    assert histogram.sum == 8.5


async def test_metrics_of_the_process_exist_before_there_is_a_model() -> None:
    metrics = SchedulerMetrics()
    names = ["quire_build_info", "quire_ready", *["quire_calls_refused_total"] * 2]
    names += [*["quire_limited_total"] * len(NUM_LIMITED)]
    names += [*["quire_unexpected_errors_total"] * 6, "quire_open_files"]
    assert [name.split("/")[0] for name in samples(metrics)] == names
    engine = FakeEngine(model=None)
    engine.become(ServerState.WAITING_FOR_EXECUTOR)
    metrics.engine = cast("Engine", engine)
    assert [name.split("/")[0] for name in samples(metrics)] == names
    assert samples(metrics)["quire_ready"] == 0


async def test_ready_follows_the_engine() -> None:
    metrics = await metrics_of_fake_engine(Clock())
    engine = cast("FakeEngine", metrics.engine)
    for state in ServerState:
        engine.become(state)
        assert samples(metrics)["quire_ready"] == (state is ServerState.SERVING)


async def test_exemplar_is_the_last_request_of_its_bucket() -> None:
    clock = Clock()
    metrics = await metrics_of_fake_engine(clock)
    for name, queue_s in (("first", 1.5), ("second", 1.75), ("third", 400)):
        request = metrics.request(1, clock.now_s, exemplar_labels(name, "5" * 32))
        clock.now_s += queue_s
        request.started(num_prompt_tokens=10, num_cached_tokens=0)
    found = exemplars(metrics, "quire_request_queue_time_seconds")
    assert {bound: exemplar.labels["request_id"] for bound, exemplar in found.items()} == {
        "2.5": "second",
        "600.0": "third",
    }
    assert found["2.5"].labels["trace_id"] == "5" * 32
    assert found["2.5"].value == 1.75
    assert float(found["2.5"].timestamp) == pytest.approx(time.time() - 400, abs=60)
    assert b'"second"' not in metrics.render()


async def test_exemplars_fit_the_limit_of_open_metrics() -> None:
    metrics = await metrics_of_fake_engine(Clock())
    for request_id in ("x" * 256, "é" * 128, '"' * 256, ""):
        request = metrics.request(1, 100.0, exemplar_labels(request_id, "5" * 32))
        request.started(num_prompt_tokens=10, num_cached_tokens=0)
        (exemplar,) = exemplars(metrics, "quire_request_queue_time_seconds").values()
        assert exemplar.labels["request_id"] == request_id[:78]
        assert sum(map(len, itertools.chain(*exemplar.labels.items()))) <= 128


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", TEXT),
        ("*/*", TEXT),
        ("text/plain", TEXT),
        ("application/openmetrics-text", OPEN_METRICS),
        ("text/plain;q=0.5, Application/OpenMetrics-Text; version=1.0.0;q=0.9", OPEN_METRICS),
        ("application/openmetrics-text-not", TEXT),
    ],
)
async def test_content_type_follows_the_accept_header(accept: str, content_type: str) -> None:
    metrics = await metrics_of_fake_engine(Clock())
    given, page = metrics.answer(accept)
    assert given == content_type
    assert page.endswith(b"# EOF\n") == (content_type == OPEN_METRICS)


async def test_request_with_several_waiting_samples_counts_once() -> None:
    metrics = await metrics_of_fake_engine(Clock())
    core = Scheduler(
        SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64), num_blocks=16, block_size=4
    )
    cast("FakeEngine", metrics.engine).core = core
    core.executor_attached(1, 16)
    core.add(Request(1, (1, 2, 3), SequenceParams(max_total_tokens=10), seeds=(0, 1, 2)))
    plan = core.schedule()
    assert plan is not None
    core.commit(StepResult(1, 1, token_ids=[5, 6, 7]))
    assert core.schedule() is not None
    core.executor_lost()
    assert core.num_waiting == 3
    found = samples(metrics)
    assert found["quire_queue_requests/executor_lost"] == 1
    assert found["quire_queue_requests/new"] == found["quire_queue_requests/preempted"] == 0


async def test_a_deferred_sequence_waits_until_it_runs_again() -> None:
    metrics = await metrics_of_fake_engine(Clock())
    harness = build_harness(make_request(1, max_tokens=4))
    cast("FakeEngine", metrics.engine).core = harness.scheduler
    harness.defer(1)
    harness.schedule()
    harness.commit()
    assert harness.schedule() is None, "it pauses"
    assert len(harness.scheduler.state.waiting) == 0
    found = samples(metrics)
    assert found["quire_requests_running"] == 0
    assert found["quire_queue_requests/deferred"] == found["quire_tenant_sequences_waiting/default"] == 1
    assert found["quire_queue_prompt_tokens"] == block_map(harness.scheduler).num_waiting_prompt_tokens > 0
    assert block_map(harness.scheduler).num_waiting == 1
    shown = take_snapshot(metrics.engine)
    assert (shown.num_waiting, shown.num_waiting_prompt_tokens) == (1, found["quire_queue_prompt_tokens"])
    harness.expire(1.0)
    harness.schedule()
    found = samples(metrics)
    assert found["quire_queue_requests/deferred"] == found["quire_tenant_sequences_waiting/default"] == 0
    assert found["quire_requests_running"] == 1


async def test_pool_and_core_are_measured() -> None:
    found = samples(await metrics_of_fake_engine(Clock()))
    assert {state: found[f"quire_kv_blocks/{state}"] for state in ("free", "cached", "active")} == {
        "free": 1,
        "cached": 1,
        "active": 1,
    }
    assert found["quire_kv_slots/wasted"] == 4
    assert found["quire_kv_waste_ratio"] == 0.25
    assert found["quire_queue_requests/new"] == found["quire_requests_running"] == 0
    assert found["quire_preemptions_total/recompute"] == 0


async def test_steps_and_age_of_the_queue_are_measured() -> None:
    metrics = await metrics_of_fake_engine(Clock())
    cast("FakeEngine", metrics.engine).oldest_waiting_s = 2.5
    for num_tokens in (512, 3):
        metrics.planned(StepPlan(epoch=1, step_id=1, num_tokens=num_tokens), 0.25)
    found = samples(metrics)
    assert found["quire_queue_oldest_age_seconds"] == 2.5
    assert (found["quire_step_batch_tokens_count"], found["quire_step_batch_tokens_sum"]) == (2, 515)
    assert found["quire_schedule_duration_seconds_sum"] == 0.5


async def test_requests_through_the_server_are_counted(servers: Servers) -> None:
    served = await servers.start()
    done = served.generation.Generate(pb.GenerateRequest(text="hello"))
    submitted = (await served.engine.next_request()).start(num_cached_tokens=1)
    submitted.emit([60, 61])
    submitted.finish(FinishReason.EOS)
    assert [message async for message in done]
    gone = served.generation.Generate(pb.GenerateRequest(text="hello"))
    await served.engine.next_request()
    gone.cancel()
    refused = served.generation.Generate(pb.GenerateRequest())
    await refused.code()
    await served.idle()
    await asyncio.sleep(0)
    found = samples(servers.metrics)
    assert found["quire_requests_finished_total/eos"] == 1
    assert found["quire_requests_finished_total/cancelled"] == 1
    assert found["quire_requests_rejected_total/invalid_argument"] == 1
    assert found["quire_generation_tokens_total"] == 2
    assert found["quire_prompt_tokens_total/cached"] == 1
