"""The throughput bound, computed by hand for a small model, and the command on results of the repository."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from bench.command_line import BenchError
from bench.serving.ceiling import Rates, Work, most_tokens_per_s, read_turns, render_table
from planning.model_shape import ModelShape
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

# Layers of 2 × 10 × (2 × 8 + 2 × 4 + 3 × 12) = 1,200 numbers, a head of 500; 16 numbers of KV a token.
MODEL = ModelShape("hand", 50, 10, 12, 2, 2, 1, 4, 99, tie_word_embeddings=True)
WORK = Work(num_sequences=2, num_prompt_tokens=12, num_output_tokens=4)


@pytest.mark.parametrize(
    ("concurrency", "decode_s"),
    [(1, 1700 * 4 / 100), (4, 1700 / 100), (1000, 2 * 1700 / 1000)],  # bound by bandwidth, then by arithmetic
)
def test_bound_equals_the_sum_by_hand(concurrency: int, decode_s: float) -> None:
    prompt_s = 3 * 2 * 1200 / 1000
    kv_s = 7 * 16 * 4 / 100
    rates = Rates(bandwidth=100.0, flops=1000.0)
    assert most_tokens_per_s(MODEL, 4, WORK, concurrency, rates) == pytest.approx(1 / (decode_s + prompt_s + kv_s))


def test_cached_tokens_do_not_count_as_work() -> None:
    run = {"num_requests": 3, "num_prompt_tokens": 90, "num_cached_tokens": 60, "num_output_tokens": 7}
    assert Work.of(run) == Work(3, 30, 7)


def test_each_sample_is_a_sequence_and_the_prompt_is_one_context_for_all_of_them() -> None:
    """Two clients with 3 samples each: 6 sequences share a reading of the weights, and 3 the KV of a prompt."""
    run = {"num_requests": 2, "num_prompt_tokens": 12, "num_cached_tokens": 0, "num_output_tokens": 24}
    work = Work.of(run, num_samples=3)
    read_s, prompt_s, kv_s = 1700 * 4 / 100 / 6, 12 / 24 * 2 * 1200 / 1e6, (12 + 12) / 6 * 16 * 4 / 100
    bound = most_tokens_per_s(MODEL, 4, work, 6, Rates(bandwidth=100.0, flops=1e6))
    assert bound == pytest.approx(1 / (read_s + prompt_s + kv_s))


def run_of(engine: str, index: int, profile: str | None, rate: float, num_output_tokens: int = 24) -> dict[str, object]:
    return {
        "engine": engine, "round": index, "profile": profile, "concurrency": 2, "num_requests": 2,
        "num_prompt_tokens": 12, "num_cached_tokens": 0, "num_output_tokens": num_output_tokens,
        "output_tokens_per_s": rate,
    }  # fmt: skip


def test_profiles_and_rounds_are_kept_apart() -> None:
    """Each round has a bound of its own. Two profiles with the same number of clients have a row each."""
    rates = Rates(bandwidth=100.0, flops=1000.0)
    results = {
        "runs": [
            run_of("quire", 0, "n4", 0.2), run_of("peer", 0, "n4", 0.1),
            run_of("peer", 1, "n4", 0.1, 48), run_of("quire", 1, "n4", 0.3, 48),
            run_of("quire", 0, "", 0.02), run_of("peer", 0, "", 0.01),
        ],
        "traces": [{"round": index, "profile": "n4", "concurrency": 2, "num_samples": 4} for index in (0, 1)],
    }  # fmt: skip
    turns = read_turns(results)
    assert [(turn.label, turn.num_samples) for turn in turns] == [("n4", 4), ("n4", 4), ("2", 1)]
    assert [(turn.quire["output_tokens_per_s"], turn.peer["output_tokens_per_s"]) for turn in turns] == [
        (0.2, 0.1), (0.3, 0.1), (0.02, 0.01),
    ]  # fmt: skip
    bounds = [most_tokens_per_s(MODEL, 4, Work(8, 12, number), 8, rates) for number in (24, 48)]
    cells = [list(column.cells) for column in render_table(MODEL, "float32", turns, rates).columns]
    assert cells[0] == ["n4", "2"]
    assert cells[2][0] == f"{(0.2 / bounds[0] + 0.3 / bounds[1]) / 2:.0%}"


def test_results_beside_two_engines_are_refused() -> None:
    runs = [run_of(engine, 0, "", 1.0) for engine in ("quire", "peer", "transformers")]
    with pytest.raises(BenchError, match="not peer, transformers"):
        read_turns({"runs": runs})


def test_rates_are_taken_from_all_threads() -> None:
    def row(num_threads: int, dtype: str, tflops: float | None, operation: str = "linear") -> dict[str, object]:
        return {"operation": operation, "num_threads": num_threads, "dtype": dtype, "tflops": tflops}

    rows = [row(1, "float32", 9.0), *(row(2, "float32", tflops) for tflops in (0.4, 0.5, None))]
    rows += [row(2, "bfloat16", 0.9), row(2, "float32", 7.0, "attention_prefill")]
    measured = {
        "rows": rows,
        "ceilings": {"1 threads": {"read_gb_per_s": 27.0}, "2 threads": {"read_gb_per_s": 50.0}},
    }
    assert Rates.of(measured, "float32") == Rates(50e9, 0.5e12)
    with pytest.raises(ValueError, match="float16"):
        Rates.of(measured, "float16")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_command_prints_a_row_for_each_concurrency(tmp_path: Path, dtype: str) -> None:
    """The dtype is that of the server, whatever the checkpoint has."""
    config = json.loads((ROOT / "models" / "tiny" / "config.json").read_text()) | {"dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    results = ROOT / "bench" / "results"
    command = [sys.executable, "-m", "bench", "serving-ceiling", "--model", str(tmp_path)]
    name = "small-cpu-vllm.json" if dtype == "float32" else "small-bfloat16-cpu-vllm.json"
    command += ["--results", str(results / name), "--rates", str(results / "kernels-cpu.json")]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert f", {dtype}, at" in finished.stdout
    rows = [line.split() for line in finished.stdout.splitlines() if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == ["1", "4", "8", "16", "32", "64"]
    assert all(2 * int(row[3].rstrip("%")) == pytest.approx(int(row[4].rstrip("%")), abs=1.1) for row in rows)
