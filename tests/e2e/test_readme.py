"""Runs every command and every piece of Python in the README, CONTRIBUTING.md and docs/, or names what runs it.

The tests replace addresses and models only: free ports for the defaults, a small random checkpoint for a large one.
"""

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import quire
from quire.model_path import resolved_model
from tests.support.e2e.process import ROOT, Process
from tests.support.e2e.stack import TINY
from tests.support.executor.checkpoints import make_checkpoint

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
PORTS = ("listen", "http-listen", "executor", "metrics-address", "gateway-listen")
FREE_PORTS = [f"--{flag}=127.0.0.1:0" for flag in PORTS]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


def commands() -> set[str]:
    """Returns the lines of shell blocks, and `make …` and `.venv/bin/…` in running text."""
    lines = {line.strip() for block in blocks("sh") for line in block.splitlines() if line.strip()}
    return lines | set(re.findall(r"`(make [a-z-]+|\.venv/bin/[^`]+)`", TEXT))


COVERED = {
    "make run": "test_make_run",
    "make test": "is the command that runs these tests",
    "make test-all": "runs these tests, and the exhaustive ones",
    "make verify": "CI runs its parts",
    "make lint": "CI runs it",
    "make wheel-check": "CI runs it",
    "make upgrade-check": "test_make_targets; it builds two wheels, for which it needs a package index and minutes",
    ".venv/bin/quire checksum /data/Llama-3.1-8B-Instruct": "tests/quire/test_checksums.py writes a manifest",
    "make lock": "tests/deploy/test_locks.py compares what it writes; it needs a package index and minutes",
    "make supply-check": "CI runs it",
    "make dashboards": "tests/deploy/test_dashboards.py and test_operations_page.py compare what it writes",
    ".venv/bin/python -m checks.words": "make lint runs it",
    "make help": "test_make_targets",
    "make gpu-check": "the tests in tests/bench/gpu run its phases on a small scale",
    "make gpu-bundle": "test_make_targets; checks.gpu_rehearsal, which CI runs, makes a bundle and uses it",
    "make fmt": "test_make_targets",
    "make protos": "test_make_targets",
    "make clean": "test_make_targets",
    "make bench": "test_make_bench",
    "make serve": "test_commands_against_a_server",
    ".venv/bin/python -m bench scheduler-cost": "test_scheduler_cost",
    ".venv/bin/python -m bench shell-cost": "tests/bench/overhead/test_shell_cost.py measures with few clients",
    ".venv/bin/python -m bench paired --model models/tiny --baseline --concurrency 1,4,16,64": "test_bench_paired",
    '.venv/bin/quire generate "Once upon a time"': "test_commands_against_a_server",
    ".venv/bin/quire kv": "test_commands_against_a_server",
    "curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' "
    '-d \'{"prompt": "Once upon a time", "max_tokens": 32}\'': "test_openai_api_of_the_pages",
    '.venv/bin/quire generate "Once upon a time" --n 4 --seed 7 --max-tokens 40': "test_commands_against_a_server",
    '.venv/bin/quire generate "Once upon a time" --beam-width 4 --n 2 '
    "--max-tokens 40": "test_commands_against_a_server",
    '.venv/bin/quire generate "Once upon a time" --temperature 0 --logprobs 3 --max-tokens 8 --repetition-penalty 1.2 '
    "--logit-bias 77=-5": "test_commands_against_a_server",
    ".venv/bin/quire bench sharing --num-requests 24": "test_bench_sharing",
    "make claims": "test_make_claims",
    "make compose-check": "CI runs it where there is a container engine",
    "docker compose up": "make compose-check runs it",
    ".venv/bin/quire plan llama-3.1-8b --device h100": "test_planning",
    ".venv/bin/quire simulate llama-3.1-8b --rate 2 --duration-s 600": "test_planning",
    ".venv/bin/quire serve --tensor-parallel-size 2": "tests/e2e/test_ranks.py runs it on free ports",
    ".venv/bin/quire simulate llama-3.1-8b --replicas 4 --rate 40 --num-requests 400 --system-tokens 2048 "
    "--system-prompts 32 --failures 1@4": "test_planning",
    ".venv/bin/quire serve --model Qwen/Qwen3-0.6B": "test_serving_from_the_hub",
    ".venv/bin/quire serve --model /data/Llama-3.1-8B-Instruct --dtype bfloat16": "test_serving_a_directory",
}


def test_every_command_of_the_pages_is_run() -> None:
    assert commands() == set(COVERED)


def run(*command: str, timeout_s: float = 240) -> str:
    """Runs a command in the repository and returns its output; fails with the output unless it exits with 0."""
    done = subprocess.run(
        command, cwd=ROOT, timeout=timeout_s, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def make_command(*arguments: str) -> list[str]:
    """Returns a `make` command that uses the environment of these tests."""
    return ["make", f"BIN={Path(sys.executable).parent}", "INSTALLED=", *arguments]


def test_make_run() -> None:
    output = run(*make_command("run"))
    assert re.search(r"\d+ tokens in .* tokens/s", output)
    assert "CoW" in output


@pytest.mark.parametrize("target", ["help", "gpu-bundle", "upgrade-check", "fmt", "protos", "clean"])
def test_make_targets(target: str) -> None:
    """These targets change the checkout, so make prints their commands only."""
    assert "make: ***" not in run(*make_command("--dry-run", target))


@pytest.mark.exhaustive
def test_make_bench(tmp_path: Path) -> None:
    """The page's command, with flags that make it short."""
    output = tmp_path / "bench.json"
    short = ("--concurrency 1,2", "--num-requests 2", "--num-blocks 512")
    run(*make_command("bench", f"ARGS={' '.join(short)} --output {output}"))
    assert output.exists()


@pytest.mark.exhaustive
def test_bench_paired(tmp_path: Path) -> None:
    """The page's command, with flags that make it short."""
    results = tmp_path / "paired.json"
    short = shlex.split("--concurrency 2 --rounds 1 --num-requests 2 --num-threads 1 --max-model-len 256")
    run(sys.executable, "-m", "bench", "paired", "--model", "models/tiny", "--baseline", *short, "--json", str(results))
    assert json.loads(results.read_text())["ratios"].keys() == {"2"}


@pytest.mark.exhaustive
def test_make_claims(tmp_path: Path) -> None:
    """Runs two claims on a small scale; tests/bench/claims/test_claims.py has one that starts services."""
    only = [f"--only {name}" for name in ("timeline", "kv-arithmetic")]
    run(*make_command("claims", f"ARGS=--quick {' '.join(only)} --output {tmp_path}"))
    results = json.loads((tmp_path / "results.json").read_text())
    assert {name: outcome["failure"] for name, outcome in results["outcomes"].items()} == dict.fromkeys(
        ("timeline", "kv-arithmetic")
    )
    assert "<svg" in (tmp_path / "report.html").read_text()


def test_scheduler_cost(tmp_path: Path) -> None:
    """Measures few sequences instead of thousands."""
    results = tmp_path / "cost.json"
    table = run(sys.executable, "-m", "bench", "scheduler-cost", "4", "8", "--json", str(results)).splitlines()
    assert [row["running"] for row in json.loads(results.read_text())["rows"]] == [4, 8]
    assert [line.split()[0] for line in table] == ["running", "4", "8"]
    assert all(float(line.split()[2]) > 0 for line in table[1:])


@pytest.fixture(scope="module")
def make_serve() -> Iterator[dict[str, str]]:
    """Runs `make serve`; yields the addresses of its ready line."""
    serve = Process("make serve", make_command("serve", f"ARGS={shlex.join(FREE_PORTS)}"))
    try:
        yield dict(word.split("=", 1) for word in serve.line("ready ").split()[1:])
    finally:
        serve.kill()


def test_commands_against_a_server(make_serve: dict[str, str]) -> None:
    mine = [command for command, test in COVERED.items() if test == "test_commands_against_a_server"]
    mine.remove("make serve")  # it is the server
    wanted = {"--n 4": "--- 3 ---", "--beam-width": "--- 1, score -", "--logprobs": "most probable", " kv": "free"}
    for command in mine:
        output = run(sys.executable, "-m", "quire", *shlex.split(command)[1:], "--address", make_serve["grpc"])
        assert next((text for part, text in wanted.items() if part in command), ".") in output, command


@pytest.mark.exhaustive
def test_bench_sharing(tmp_path: Path) -> None:
    """The page's command, with flags that make it short."""
    output = tmp_path / "sharing.json"
    flags = ["--numbers", "2", "--num-requests", "1", "--num-blocks", "1024", "--output", str(output)]
    printed = run(sys.executable, "-m", "quire", "bench", "sharing", *flags)
    assert "37.6-55.2%" in printed
    saved = {case["case"]["mode"]: case["saved_ratio"] for case in json.loads(output.read_text())["cases"]}
    assert set(saved) == {"samples", "beams", "system prompt"}
    assert all(0 < ratio < 1 for ratio in saved.values())
    assert output.with_suffix(".png").exists() == _has_matplotlib()


def _has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def test_planning() -> None:
    """The commands run unchanged, because they need no device."""
    wanted = {"plan": "decode floor", "simulate": "real time"}
    for command in (command for command, test in COVERED.items() if test == "test_planning"):
        words = shlex.split(command)[1:]
        assert wanted[words[0]] in run(sys.executable, "-m", "quire", *words)


def test_python_of_the_pages(make_serve: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = (block for block in blocks("python") if "quire.Client()" in block)
    exec(code.replace("quire.Client()", f"quire.Client({make_serve['grpc']!r})"), {"quire": quire})  # noqa: S102
    assert {line[0] for line in capsys.readouterr().out.splitlines() if line[:2] in ("0 ", "1 ")} == {"0", "1"}


def test_openai_api_of_the_pages(make_serve: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = (command for command, test in COVERED.items() if test == "test_openai_api_of_the_pages")
    (code,) = (block for block in blocks("python") if "openai.OpenAI(" in block)
    openai = make_serve["openai"]
    if shutil.which("curl"):
        answer = subprocess.check_output(shlex.split(command.replace("127.0.0.1:8000", openai)), timeout=60)
        assert json.loads(answer)["choices"][0]["text"]
    exec(code.replace("127.0.0.1:8000", openai), {})  # noqa: S102
    assert capsys.readouterr().out.strip()


def checkpoint(family: str, directory: Path) -> Path:
    make_checkpoint(family, directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(TINY) / name, directory / name)
    return directory


def serve_until_ready(command: str) -> str:
    """Runs a `quire serve …` command and returns its ready line."""
    words = shlex.split(command)
    flags = [*FREE_PORTS, "--num-blocks=64", "--max-model-len=128"]
    serve = Process("serve", [sys.executable, "-m", "quire", *words[1:], *flags])
    try:
        return serve.line("ready ")
    finally:
        serve.kill()


def test_serving_a_directory(tmp_path: Path) -> None:
    command = ".venv/bin/quire serve --model /data/Llama-3.1-8B-Instruct --dtype bfloat16"
    assert command in COVERED
    directory = checkpoint("llama-llama3", tmp_path / "Llama-3.1-8B-Instruct")
    assert "grpc=" in serve_until_ready(command.replace("/data/Llama-3.1-8B-Instruct", str(directory)))


def test_serving_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub cache holds the model already, as after a download, so the server fetches nothing."""
    command = ".venv/bin/quire serve --model Qwen/Qwen3-0.6B"
    assert command in COVERED
    repository = tmp_path / "hub" / "models--Qwen--Qwen3-0.6B"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "snapshots").mkdir()
    checkpoint("qwen3", repository / "snapshots" / ("0" * 40))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "grpc=" in serve_until_ready(command)


def test_the_embedded_model_is_the_default() -> None:
    assert Path(resolved_model(None)).resolve() == Path(TINY).resolve()
