"""`quire plan` and `quire simulate` on the command line, and the files they read."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import quire.cli.main
from bench.step_traces import save_chrome_trace
from planning.errors import PlanningError
from planning.request_file import read_jobs
from quire.block_map import StepTrace


def invoke(*words: str) -> Result:
    return CliRunner().invoke(quire.cli.main.app, words)


def simulated(*words: str) -> dict[str, Any]:
    result = invoke("simulate", "qwen3-0.6b", "--num-requests", "20", *words, "--json")
    assert result.exit_code == 0, result.output
    values: dict[str, Any] = json.loads(result.stdout)
    return values


def refused(*words: str) -> str:
    result = invoke("simulate", "qwen3-0.6b", *words)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.output
    return result.stderr


def test_a_printed_plan_names_its_units() -> None:
    result = invoke("plan", "llama-3-70b", "--tensor-parallel", "8", "--max-model-len", "131072")
    assert result.exit_code == 0
    assert "40,960 bytes = 40 KiB" in result.stdout
    assert "5.37 GB = 5.00 GiB" in result.stdout
    assert "GB and MB are decimal" in result.stdout


def test_a_plan_is_printed_as_json() -> None:
    result = invoke(
        "plan", "llama-3-70b", "--tensor-parallel", "16", "--device", "h200", "--dtype", "float32", "--json"
    )
    values = json.loads(result.stdout)
    assert values["kv_bytes_per_token"] == 2 * 80 * 1 * 128 * 4
    assert values["num_kv_copies"] == 2
    assert any("8 kv heads: each head, and its KV, is on 2 devices" in note for note in values["notes"])


@pytest.mark.parametrize("words", [("llama-3-70b", "--num-blocks", "10"), ("qwen3-0.6b", "--num-blocks", "1000000")])
def test_a_plan_whose_blocks_do_not_fit_is_refused(words: tuple[str, ...]) -> None:
    result = invoke("plan", *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "num_blocks" in result.stderr


def test_a_simulation_is_printed() -> None:
    result = invoke("simulate", "llama-3.1-8b", "--rate", "2", "--num-requests", "10")
    assert result.exit_code == 0
    assert "x real time" in result.stdout
    assert "TTFT" in result.stdout


def test_a_simulation_as_json_is_reproducible() -> None:
    first, again = (simulated("--rate", "5") for _ in range(2))
    for values in (first, again):
        assert values["summary"].pop("wall_s") > 0
        del values["summary"]["real_time_factor"]
    assert first == again
    assert first["summary"]["num_requests"] == 20
    assert {"time_s", "num_running", "num_waiting", "num_used_slots"} <= first["timeline"][0].keys()


@pytest.mark.parametrize(
    "words",
    [
        ("--clients", "4", "--turnaround-s", "0.5"),
        ("--rate", "5", "--burstiness", "4", "--lengths", "alpaca"),
        ("--rate", "5", "--daily-swing", "0.5", "--duration-s", "10"),
        (
            "--clients",
            "8",
            "--lengths",
            "fixed",
            "--prompt-tokens",
            "100",
            "--output-tokens",
            "20",
            "--num-blocks",
            "40",
        ),
        ("--rate", "20", "--system-tokens", "64", "--system-share", "0.5", "--policy", "priority"),
        ("--clients", "4", "--tensor-parallel", "2", "--device", "h200", "--max-num-seqs", "2", "--max-in-flight", "1"),
    ],
)
def test_every_kind_of_workload_is_simulated(words: tuple[str, ...]) -> None:
    assert simulated(*words)["summary"]["num_requests"] > 0


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((), "give either clients"),
        (("--rate", "1", "--clients", "1"), "give either clients"),
        (("--rate", "0"), "rate and burstiness"),
        (("--rate", "nan"), "rate and burstiness"),
        (("--rate", "1e-308"), "rate and burstiness"),
        (("--rate", "1", "--burstiness", "1e-308"), "rate and burstiness"),
        (("--rate", "1", "--duration-s", "1e308"), "duration_s"),
        (("--rate", "1", "--device-memory", "9" * 400), "at most 1000TB"),
        (("--rate", "1", "--device-memory", "999TB"), "num_blocks: at most 10,000,000 are simulated"),
        (("--rate", "1", "--lengths", "fixed", "--prompt-tokens", "10000000000", "--output-tokens", "1"), "at most"),
        (("--rate", "1", "--burstiness", "inf"), "rate and burstiness"),
        (("--rate", "1", "--duration-s", "inf"), "duration_s"),
        (("--clients", "1", "--turnaround-s", "nan"), "turnaround_s"),
        (("--rate", "1", "--num-blocks", "1000000"), "num_blocks: 1,000,000 blocks need"),
        (("--clients", "1", "--turnaround-s", "1e308"), "turnaround_s"),
        (("--rate", "1", "--target-inter-token-latency-ms", "inf"), "target_inter_token_latency_ms"),
        (("--clients", "0"), "clients: from 1 to 1,000,000"),
        (("--clients", "2147483648", "--num-requests", "5"), "clients: from 1 to 1,000,000"),
        (("--clients", "1001"), "require num_requests"),
        (("--rate", "1", "--daily-swing", "2"), "daily_swing"),
        (("--rate", "1", "--lengths", "fixed"), "requires prompt_tokens and output_tokens"),
        (("--rate", "1", "--lengths", "nothing.jsonl"), "nothing.jsonl"),
        (("--rate", "1", "--policy", "chaos"), "policy: 'chaos'"),
        (("--rate", "1", "--batching", "chaos"), "batching: 'chaos'"),
        (("--rate", "1", "--max-num-seqs", "300", "--max-num-batched-tokens", "200"), "max_num_batched_tokens"),
        (("--rate", "1", "--fit", "nothing.json"), "nothing.json"),
        (("--rate", "1", "--tenants", "nothing.json"), "nothing.json"),
        (("--rate", "1", "--num-requests", "0"), "num_requests"),
        (("--rate", "1", "--system-tokens", "9000"), "system_tokens"),
        (("--rate", "1", "--system-prompts", "0"), "system_prompts"),
        (("--rate", "1", "--system-skew", "-1"), "system_skew"),
        (("--rate", "1", "--routing", "ring"), "routing: requires replicas"),
        (("--rate", "1", "--failures", "0@1"), "failures: requires replicas"),
        (("--rate", "1", "--replicas", "0"), "replicas: from 1 to"),
        (("--rate", "1", "--replicas", "10001"), "replicas: from 1 to"),
        (("--rate", "1", "--replicas", "10000"), "10,000 replicas of"),
        (("--rate", "1", "--replicas", "2", "--routing", "chaos"), "routing: 'chaos'"),
        (("--rate", "1", "--replicas", "2", "--routers", "0"), "routers: from 1 to"),
        (("--rate", "1", "--replicas", "2", "--event-delay-ms", "-1"), "event_delay_ms"),
        (("--rate", "1", "--replicas", "2", "--event-delay-ms", "nan"), "event_delay_ms"),
        (("--rate", "1", "--replicas", "2", "--event-delay-ms", "1e308"), "event_delay_ms"),
        (("--rate", "1", "--replicas", "2", "--event-loss", "1"), "event_loss"),
        (("--rate", "1", "--replicas", "2", "--failures", "2@1"), "failures: expected REPLICA@SECONDS"),
        (("--rate", "1", "--replicas", "2", "--mean-failure-s", "0.5"), "mean_failure_s"),
        (("--rate", "1", "--replicas", "2", "--failures", "0@" + "9" * 40), "failures: expected REPLICA@SECONDS"),
        (("--rate", "1", "--replicas", "2", "--mean-failure-s", "inf"), "mean_failure_s"),
        (("--rate", "1", "--replicas", "2", "--repair-s", "inf"), "repair_s"),
        (("--rate", "1", "--replicas", "2", "--repair-s", "1e308"), "repair_s"),
    ],
)
def test_invalid_settings_give_one_line_and_exit_code_2(words: tuple[str, ...], problem: str) -> None:
    assert problem in refused(*words)


def test_a_fleet_is_printed_as_simulated() -> None:
    words = (
        "--replicas",
        "3",
        "--rate",
        "20",
        "--num-requests",
        "30",
        "--system-tokens",
        "64",
        "--system-prompts",
        "4",
    )
    result = invoke("simulate", "llama-3.1-8b", *words, "--routing", "oracle")
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    for part in ("3 replicas of llama-3.1-8b", "oracle (simulated)", "times, ms (simulated)", "prompt tokens found"):
        assert part in text


def test_a_fleet_as_json_has_every_figure() -> None:
    words = ("--replicas", "2", "--routers", "2", "--event-delay-ms", "20", "--event-loss", "0.2", "--rate", "40")
    values = simulated(*words, "--system-tokens", "64", "--failures", "1@0.1", "--repair-s", "0.2")
    summary = values["summary"]
    assert values["is_simulated"]
    assert (summary["num_requests"], summary["num_replicas"], summary["num_deaths"]) == (20, 2, 1)
    assert summary["num_lost_reports"] > 0
    assert summary["tenants"][0]["ttft_s"]["p99"] > 0


def test_tenants_share_a_fleet(tmp_path: Path) -> None:
    path = tmp_path / "tenants.json"
    chat = {"name": "chat", "rate": 20, "lengths": "alpaca", "system_tokens": 128, "system_prompts": 3}
    path.write_text(json.dumps([chat, {"name": "batch", "clients": 4}]))
    tenants = simulated("--replicas", "2", "--tenants", str(path))["summary"]["tenants"]
    assert [tenant["name"] for tenant in tenants] == ["all", "chat", "batch"]
    assert tenants[0]["num_requests"] == tenants[1]["num_requests"] + tenants[2]["num_requests"] == 20


def test_half_a_system_prompt_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tenants.json"
    path.write_text('[{"rate": 1, "system_tokens": 64, "system_prompts": 2.5}]')
    assert "system_prompts" in refused("--tenants", str(path))


def test_a_trace_of_requests_is_simulated(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    lines = [{"prompt_tokens": 10 + i, "output_tokens": 5, "arrival_s": 3.0 - i} for i in range(3)]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    jobs, have_times = read_jobs(path)
    assert have_times
    assert [(job.arrival_s, job.num_prompt_tokens) for job in jobs] == [(1.0, 12), (2.0, 11), (3.0, 10)]
    result = invoke("simulate", "qwen3-0.6b", "--lengths", str(path), "--json")
    summary = json.loads(result.stdout)["summary"]
    assert (summary["num_requests"], summary["tenants"][0]["num_output_tokens"]) == (3, 15)
    assert summary["virtual_s"] > 3.0
    closed = simulated("--lengths", str(path), "--clients", "2")["summary"]
    assert closed["num_requests"] == 3
    assert closed["virtual_s"] < 1.0


@pytest.mark.parametrize("replicas", [(), ("--replicas", "2")])
def test_a_file_is_read_once_so_that_it_may_be_a_pipe(tmp_path: Path, replicas: tuple[str, ...]) -> None:
    path = tmp_path / "requests"
    os.mkfifo(path)
    writing = threading.Thread(
        target=path.write_text, args=('{"prompt_tokens": 10, "output_tokens": 5}\n',), daemon=True
    )
    writing.start()
    result = invoke("simulate", "qwen3-0.6b", "--lengths", str(path), *replicas, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["summary"]["num_requests"] == 1
    writing.join(60)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "no requests"),
        ("{\n", "line 1"),
        ('{"prompt_tokens": 5}\n', "line 1"),
        ("7\n", "line 1"),
        ('{"prompt_tokens": 5, "output_tokens": 2}\n{"prompt_tokens": 0, "output_tokens": 2}\n', "line 2"),
        ('{"prompt_tokens": 5, "output_tokens": 2, "arrival_s": -1}\n', "line 1"),
        ('{"prompt_tokens": 5, "output_tokens": 2, "arrival_s": NaN}\n', "line 1"),
        ('{"prompt_tokens": 5, "output_tokens": 2, "arrival_s": 1e10}\n', "line 1"),
        ('{"prompt_tokens": 100000000000000000000, "output_tokens": 2}\n', "line 1"),
        (f'{{"prompt_tokens": 5, "output_tokens": 2, "arrival_s": 1{"0" * 400}}}\n', "line 1"),
        ('{"prompt_tokens": 5, "output_tokens": 2, "priority": 1.5}\n', "line 1: priority"),
        (
            '{"prompt_tokens": 5, "output_tokens": 2}\n{"prompt_tokens": 5, "output_tokens": 2, "arrival_s": 1}\n',
            "1 of 2 requests have arrival_s",
        ),
    ],
)
def test_invalid_traces_are_refused(tmp_path: Path, content: str, problem: str) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(content)
    with pytest.raises(PlanningError, match=problem):
        read_jobs(path)


def test_tenants_from_a_file_are_simulated(tmp_path: Path) -> None:
    path = tmp_path / "tenants.json"
    chat = {"name": "chat", "rate": 4, "lengths": "alpaca", "priority": 0}
    batch = {"name": "batch", "clients": 4, "lengths": "sharegpt", "priority": 1, "system_tokens": 128}
    path.write_text(json.dumps([chat, batch]))
    tenants = simulated("--tenants", str(path), "--policy", "priority")["summary"]["tenants"]
    assert [tenant["name"] for tenant in tenants] == ["all", "chat", "batch"]
    assert tenants[1]["num_requests"] + tenants[2]["num_requests"] == 20


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "{}",
        "[]",
        "[7]",
        '[{"rates": 1}]',
        '[{"rate": "1"}]',
        '[{"rate": 1, "priority": 0.5}]',
        '[{"name": 3, "rate": 1}]',
        '[{"rate": 1, "system_tokens": 64, "system_prompts": "2"}]',
        '[{"clients": 2.5}]',
        '[{"rate": 1, "lengths": "fixed", "prompt_tokens": 10.5, "output_tokens": 3}]',
        '[{"rate": 1, "system_tokens": 64.5}]',
        '[{"rate": NaN}]',
        f'[{{"rate": 1{"0" * 400}}}]',
        '[{"rate": 1, "burstiness": Infinity}]',
        '[{"clients": 3, "turnaround_s": NaN}]',
        '[{"rate": 1, "priority": 1001}]',
        '[{"rate": 1, "weight": 0}]',
        '[{"rate": 1, "weight": "2"}]',
    ],
)
def test_invalid_tenants_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tenants.json"
    path.write_text(content)
    assert "tenants.json" in refused("--tenants", str(path))


def test_the_cost_model_can_be_fitted_to_measured_steps(tmp_path: Path) -> None:
    """Measured decodes of n sequences took 2 ms + n x 0.1 ms; the simulated ones take as long."""
    path = tmp_path / "steps.json"
    steps, now_ns = [], 0
    for step_id in range(1, 41):
        n = step_id % 7 + 1
        received_ns = now_ns + 2_000_000 + 100_000 * n
        steps.append(
            StepTrace(
                *(1, step_id, n, n, now_ns, now_ns + 1, received_ns, received_ns + 1),
                *(0, 0, 0, 0, 0),
                num_decodes=n,
                num_decode_pairs=n * (100 + 37 * step_id % 11),
            )
        )
        now_ns = received_ns
    save_chrome_trace(path, steps)
    words = (
        "--clients",
        "5",
        "--num-blocks",
        "1000000",  # of the measured device, which is not that of the data sheet
        "--fit",
        f"{path},{path}",
        "--lengths",
        "fixed",
        "--prompt-tokens",
        "1",
        "--output-tokens",
        "100",
    )
    tpot_s = simulated(*words)["summary"]["tenants"][0]["tpot_s"]["p50"]
    assert tpot_s == pytest.approx(2.5e-3, rel=0.01)


def test_help_does_not_load_the_planning_code() -> None:
    """`quire --help` stays fast because it imports only the settings."""
    code = "import sys, quire.cli.main; print(sorted(m for m in sys.modules if m.startswith('planning')))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert loaded.strip() == "['planning', 'planning.errors', 'planning.settings']"


def test_planning_imports_neither_torch_nor_grpc() -> None:
    code = "import sys, planning.command; print([m for m in ('torch', 'grpc', 'google.protobuf') if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert loaded.strip() == "[]"
