"""The metrics of an executor: steps by phase, labels, and the share of time without a plan."""

from __future__ import annotations

import math
import socket

import numpy as np
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from executor.metrics import IdleRatio, Metrics, executor_label
from executor.plans.plan import EndReason, StepOutput, StepTimings
from quire.unexpected import unexpected


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now_s = 1000.0

    monkeypatch.setattr("time.monotonic", lambda: Clock.now_s)
    return Clock


def test_the_ratio_is_one_until_the_first_step(clock) -> None:
    assert IdleRatio().current(None) == 1.0


def test_the_ratio_follows_the_last_seconds(clock) -> None:
    ratio = IdleRatio()
    for _ in range(1000):
        clock.now_s += 0.1
        ratio.add(idle_s=0.025, busy_s=0.075)
    assert ratio.current(None) == pytest.approx(0.25, abs=0.01)
    clock.now_s += 10.0
    assert ratio.current(None) == pytest.approx(1 - 0.75 / math.e, abs=0.01)
    clock.now_s += 1000.0
    assert ratio.current(None) == pytest.approx(1.0)


def test_one_long_step_counts_as_busy(clock) -> None:
    ratio = IdleRatio()
    ratio.add(idle_s=0.0, busy_s=1000.0)
    assert ratio.current(None) == pytest.approx(0.0)


def test_a_step_under_way_counts_as_busy(clock) -> None:
    ratio = IdleRatio()
    for _ in range(1000):  # steps without a gap
        clock.now_s += 0.2
        ratio.add(idle_s=0.0, busy_s=0.2)
    began_s = clock.now_s
    clock.now_s += 20.0
    assert ratio.current(began_s) == pytest.approx(0.0, abs=0.01)
    assert ratio.current(began_s - 1.0) == ratio.current(began_s), "it ran before the last one had ended"
    clock.now_s += 1000.0
    assert ratio.current(began_s) == pytest.approx(0.0), "a device that hangs has work"
    assert ratio.current(clock.now_s - 10.0) == pytest.approx(1 / math.e), "it was idle before"


def test_steps_are_observed_by_phase() -> None:
    metrics = Metrics("tiny", "127.0.0.1:0")
    metrics.listens_on("127.0.0.1:50052")
    metrics.set_memory("weights", 7)
    metrics.set_startup("kernels", 0.5)
    metrics.set_graphs("missing", 3)
    for _ in range(2):
        metrics.observe_step(StepTimings(queue_ns=1_000, prepare_ns=2_000_000, forward_ns=3_000_000_000, sample_ns=0))
    samples = {}
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        for sample in family.samples:
            assert sample.labels.pop("model_name") == "tiny"
            assert sample.labels.pop("executor") == "127.0.0.1:50052"
            samples["/".join([sample.name.removeprefix("quire_executor_"), *sample.labels.values()])] = sample.value
    sums = {phase: samples[f"step_duration_seconds_sum/{phase}"] for phase in ("queue", "prepare", "forward", "sample")}
    assert sums == pytest.approx({"queue": 2e-6, "prepare": 4e-3, "forward": 6.0, "sample": 0.0})
    assert samples["step_duration_seconds_count/forward"] == 2
    assert samples["step_duration_seconds_bucket/2.5/forward"] == 0
    assert samples["step_duration_seconds_bucket/5.0/forward"] == 2
    assert samples["memory_bytes/weights"] == 7
    assert samples["startup_seconds/kernels"] == 0.5
    assert samples["graphs/missing"] == 3
    assert samples["start_timestamp_seconds"] <= samples["last_step_timestamp_seconds"]


def test_brackets_of_ipv6_addresses_are_removed(monkeypatch) -> None:
    served = []
    monkeypatch.setattr("executor.metrics.serve_metrics", lambda host, port, *_: served.append((host, port)))
    Metrics("m", "[::1]:50052").serve("[::1]:9102", lambda: 0.0)
    assert served == [("::1", 9102)]


def test_the_executor_label_is_its_address() -> None:
    assert executor_label("127.0.0.1:50052") == "127.0.0.1:50052"
    assert executor_label("unix:/run/executor.sock") == "unix:/run/executor.sock"
    for anywhere in ("0.0.0.0:50052", "[::]:50052"):
        assert executor_label(anywhere) == f"{socket.gethostname()}:50052"


def test_sequences_without_finite_logits_are_counted() -> None:
    metrics = Metrics("tiny", "127.0.0.1:0")
    reasons = np.array([0, EndReason.NOT_FINITE, EndReason.EOS, EndReason.NOT_FINITE], np.uint8)
    timings = StepTimings(prepare_ns=1, forward_ns=1, sample_ns=1)
    for _ in range(3):
        metrics.observe(StepOutput(1, 1, np.zeros(4, np.int32), reasons, timings))
    lines = generate_latest(metrics.registry).decode().splitlines()
    assert [line.split()[-1] for line in lines if line.startswith("quire_executor_not_finite_total{")] == ["6.0"]


def test_unexpected_errors_are_counted_by_where(counted) -> None:
    def exported() -> dict[str, float]:
        families = text_string_to_metric_families(generate_latest(Metrics("tiny", "127.0.0.1:0").registry).decode())
        (family,) = (family for family in families if family.name == "quire_executor_unexpected_errors")
        return {sample.labels["where"]: sample.value for sample in family.samples if sample.name.endswith("_total")}

    before = exported()
    unexpected("delivery")
    assert {where: value - before[where] for where, value in exported().items() if value != before[where]} == counted()
    assert set(before) == {"plan", "step", "delivery", "between_steps", "idle_work", "preparation", "grammar"}
