"""Serving and its baselines with random weights on the CPU, on a small scale: real services and all counts."""

import asyncio
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from bench.gpu import end_to_end, transformers
from bench.gpu.end_to_end import closed_loop_turn, decode_steps, describe_steps, service_flags
from bench.gpu.random_models import SHAPES
from bench.gpu.scales import IN_SMALL
from bench.load import LoadError
from bench.serving.continuous_batches import ContinuousBatches
from bench.trace import make_trace
from quire.block_map import StepTrace


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Returns the reports that were kept, one after each part."""
    kept: list[dict[str, Any]] = []
    flags = service_flags("llama-tiny", tmp_path_factory.mktemp("model"), "cpu", IN_SMALL)
    asyncio.run(end_to_end.measure(flags, IN_SMALL, lambda report: kept.append(dict(report))))
    return kept


def test_report_is_kept_after_each_part(reports: list[dict[str, Any]]) -> None:
    assert [list(report)[3:] for report in reports] == [
        [],
        ["single"],
        ["single", "batch"],
        ["single", "batch", "closed_loop"],
    ]
    assert reports[0]["scale"] == asdict(IN_SMALL)
    server = reports[0]["server"]
    assert (server["model_name"], server["vocab_size"]) == ("llama-tiny", SHAPES["llama-tiny"]["vocab_size"])


def test_report_counts_every_token(reports: list[dict[str, Any]]) -> None:
    scale, report = IN_SMALL, reports[-1]
    assert report["single"]["num_requests"] == scale.num_singles
    assert report["single"]["num_output_tokens"] == scale.num_singles * scale.single_output_tokens
    assert report["batch"]["num_prompt_tokens"] == scale.batch_size * scale.batch_prompt_tokens
    assert report["batch"]["num_output_tokens"] == scale.batch_size * scale.batch_output_tokens
    trace = make_trace(closed_loop_turn(server_vocab(report), scale).trace)
    assert report["closed_loop"]["num_output_tokens"] == sum(request.max_tokens for request in trace)
    assert report["closed_loop"]["concurrency"] == scale.num_clients
    # No part finds prompts of another part in the prefix cache.
    assert [report[part]["num_cached_tokens"] for part in ("single", "batch", "closed_loop")] == [0, 0, 0]


def test_report_describes_decode_steps(reports: list[dict[str, Any]]) -> None:
    single = reports[-1]["single"]["step"]
    assert 2 <= single["num_steps"] <= IN_SMALL.single_output_tokens
    assert single["period_ms"] > 0
    assert 0 <= single["idle_ratio"] < 1
    # The number of short requests in one step depends on the scheduling of the clients.
    batch = reports[-1]["batch"]["step"]
    assert 0 <= batch["num_steps"] <= IN_SMALL.batch_output_tokens
    assert (batch["period_ms"] is None) == (batch["num_steps"] < 2)


def server_vocab(report: dict[str, Any]) -> int:
    return int(report["server"]["vocab_size"])


def step(step_id: int, num_sequences: int, num_tokens: int, committed_ms: float = 0.0) -> StepTrace:
    committed_ns = int(committed_ms * 1e6)
    return StepTrace(
        1, step_id, num_sequences, num_tokens, 0, 0, 0, committed_ns, 0, 1_000_000, 2_000_000, 0, 1_000_000
    )


def test_decode_steps_are_the_longest_consecutive_run() -> None:
    steps = [
        step(1, 4, 4),
        step(2, 4, 90),  # includes a prompt
        step(3, 4, 4),
        step(4, 4, 4),
        step(6, 4, 4),  # step 5 is missing
        step(7, 3, 3),
    ]
    assert [found.step_id for found in decode_steps(steps, 4)] == [3, 4]
    assert decode_steps(steps, 5) == []


def test_describe_steps_computes_medians_and_idle_ratio() -> None:
    steps = [step(1, 2, 2, 10.0), step(2, 2, 2, 14.0), step(3, 2, 2, 17.0), step(4, 2, 2, 27.0)]
    described = describe_steps(steps)
    assert described == {
        "num_steps": 4,
        "period_ms": pytest.approx(4.0),
        "busy_ms": pytest.approx(3.0),
        "idle_ratio": pytest.approx(3 / 15),
    }
    assert describe_steps([]) == {"num_steps": 0, "period_ms": None, "busy_ms": None, "idle_ratio": None}


@pytest.fixture(scope="module")
def model() -> Any:
    torch.set_num_threads(1)
    return transformers.random_model("qwen3-tiny", torch.device("cpu"))


@pytest.mark.timeout(300)
def test_both_transformers_engines_run_the_trace(model: Any) -> None:
    scale = replace(IN_SMALL, num_requests=5, num_clients=2)
    kept: list[list[str]] = []
    report = transformers.measure(model, scale, lambda now: kept.append(list(now)))
    trace = make_trace(closed_loop_turn(SHAPES["qwen3-tiny"]["vocab_size"], scale).trace)
    for engine in ("static", "continuous"):
        assert report[engine]["num_requests"] == 5
        assert report[engine]["concurrency"] == 2
        assert report[engine]["num_output_tokens"] == sum(request.max_tokens for request in trace)
        assert report[engine]["num_prompt_tokens"] == sum(len(request.prompt_token_ids) for request in trace)
    assert [names[-1] for names in kept] == ["static", "continuous"]
    assert report["dtype"] == "float32"


def test_failing_engine_leaves_its_error_and_the_other_one_runs(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Any, trace: Any, concurrency: int) -> Any:
        raise LoadError("no memory for it")

    monkeypatch.setattr(ContinuousBatches, "run", fails)
    report = transformers.measure(model, replace(IN_SMALL, num_requests=2, num_clients=1), lambda now: None)
    assert report["continuous"] == {"error": "LoadError: no memory for it"}
    assert report["static"]["num_requests"] == 2
