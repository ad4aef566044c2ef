"""The throughput bound, computed by hand for a small model, and the command on results of the repository."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from bench.serving.ceiling import Rates, Work, most_tokens_per_s
from planning.model_shape import ModelShape
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

# Layers of 2 × 10 × (2 × 8 + 2 × 4 + 3 × 12) = 1,200 numbers, a head of 500; 16 numbers of KV a token.
MODEL = ModelShape("hand", 50, 10, 12, 2, 2, 1, 4, 99, tie_word_embeddings=True)
WORK = Work(num_requests=2, num_prompt_tokens=12, num_output_tokens=4)


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


def test_command_prints_a_row_for_each_concurrency(tmp_path: Path) -> None:
    config = json.loads((ROOT / "models" / "tiny" / "config.json").read_text()) | {"dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    results = ROOT / "bench" / "results"
    command = [sys.executable, "-m", "bench", "serving-ceiling", "--model", str(tmp_path)]
    command += ["--results", str(results / "small-cpu-vllm.json"), "--rates", str(results / "kernels-cpu.json")]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    rows = [line.split() for line in finished.stdout.splitlines() if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == ["1", "4", "8", "16", "32", "64"]
    assert all(2 * int(row[3].rstrip("%")) == pytest.approx(int(row[4].rstrip("%")), abs=1.1) for row in rows)
