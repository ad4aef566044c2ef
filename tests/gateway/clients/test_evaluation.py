"""Tests with lm-eval and guidellm, from their packages, against `quire serve`.

Their packages take minutes to install, and need 700 MB: EVALUATION=1 in the environment asks for these tests.
"""

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.e2e.stack import TINY, Stack
from tests.support.gateway.environments import PROGRAMS, NotInstalled, evaluation_python
from tests.support.gateway.served import MODEL

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(os.environ.get("EVALUATION") != "1", reason="EVALUATION=1 asks for lm-eval and guidellm"),
]

NUM_DOCUMENTS = 200
MAX_DIFFERENCE = 1e-3
ANIMALS = ("fox", "bear", "owl", "frog", "hare")
NAMES = ("Tim", "Mia", "Nora", "Max", "Ella", "Finn", "Ivy")
PLACES = (" village.", " castle by the lake.", " snug shed", " garden", " forest.", " old house")
TASK = """
task: stories
dataset_path: json
dataset_kwargs:
  data_files:
    test: {documents}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list:
  - metric: acc
  - metric: acc_norm
"""
NUM_REQUESTS, NUM_OUTPUT_TOKENS = 64, 16


@pytest.fixture(scope="module")
def python() -> str:
    """Returns the Python that has the packages."""
    try:
        return evaluation_python()
    except NotInstalled as error:
        pytest.skip(f"lm-eval and guidellm: {error}")


def run(directory: Path, *command: str, **environment: str) -> str:
    """Runs a command that must not load anything from a hub. Returns its output."""
    offline = {"HF_HOME": str(directory / "hub"), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        command,
        env=os.environ | offline | environment,
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def write_task(directory: Path) -> None:
    """Writes a task whose documents are beginnings of stories. The right answer is any of the choices."""
    rng = random.Random(0)
    documents = []
    for i in range(NUM_DOCUMENTS):
        text = f"Once upon a time there was a {rng.choice(ANIMALS)} named {rng.choice(NAMES)} in the"
        choices = rng.sample(PLACES, 4)
        documents.append(json.dumps({"text": f"{i}. {text}", "choices": choices, "answer": rng.randrange(4)}))
    file = directory / "documents.jsonl"
    file.write_text("\n".join(documents))
    (directory / "stories.yaml").write_text(TASK.format(documents=file))


def test_lm_eval_measures_what_transformers_computes(stack: Stack, python: str, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    write_task(tasks)
    where = {"GATEWAY": stack.openai, "CHECKPOINT": TINY, "TASKS": str(tasks), "MODEL": MODEL}
    output = run(tmp_path, python, str(PROGRAMS / "lm_eval_client.py"), **where)
    lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"backend"')]
    found = {each["backend"]: each for each in lines}
    expected = found.pop("hf")
    assert len(expected["log_likelihoods"]) == NUM_DOCUMENTS
    assert 0 < expected["accuracies"]["acc,none"] < 1
    assert len(found) == 2
    for backend, measured in found.items():
        assert measured["accuracies"] == expected["accuracies"], backend
        differences = [
            abs(mine - theirs)
            for document, same in zip(measured["log_likelihoods"], expected["log_likelihoods"], strict=True)
            for mine, theirs in zip(document, same, strict=True)
        ]
        assert len(differences) == 4 * NUM_DOCUMENTS
        assert max(differences) < MAX_DIFFERENCE, backend


def test_guidellm_reports_no_errors(stack: Stack, python: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    flags = {
        "backend": f"kind=openai_http,target=http://{stack.openai},model={MODEL}",
        "profile": "kind=concurrent,streams=4",
        "constraint": f"kind=max_requests,count={NUM_REQUESTS}",
        "tokenizer": f"kind=huggingface_auto,model={TINY}",
        "data": f"kind=synthetic_text,prompt_tokens=32,output_tokens={NUM_OUTPUT_TOKENS}",
        "output": f"kind=json,path={report}",
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    run(tmp_path, python, "-m", "guidellm", "run", *words, "--disable-progress")
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals: dict[str, Any] = benchmark["metrics"]["request_totals"]
    assert totals == {"successful": NUM_REQUESTS, "errored": 0, "incomplete": 0, "total": NUM_REQUESTS}
    lengths = [request["output_tokens"] for request in benchmark["requests"]["successful"]]
    assert lengths == [NUM_OUTPUT_TOKENS] * NUM_REQUESTS
