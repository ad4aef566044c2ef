"""Suites that test servers for conformance to the APIs, from their packages against `quire serve`.

Everything that they have runs. What does not hold is listed by name, with what the suite says and the reason.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.e2e.stack import Stack
from tests.support.gateway.environments import NotInstalled, node_tool, python_tool
from tests.support.gateway.served import KEY, MODEL, served
from tests.support.paths import ROOT

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(900)]

FORMATS = {
    "openai-chat": [],
    "open-responses": [],
    "anthropic": ["--auth-header", "x-api-key", "--no-bearer", "--header", "anthropic-version:2023-06-01"],
}
"""The suites of llm-comply, with the flags that they need."""

NO_IMAGES = "the server reads texts only, and refuses images"
NO_END = "the schema allows any property, and the embedded model adds properties until its context is full"
NO_MODEL_NAMED = "a request without a model takes the only one that is served, as docs/openai.md says"
FAILURES = {
    "chat-image-input": ("HTTP 400 (expected [200])", NO_IMAGES),
    "chat-tool-calling": ("finish_reason: expected 'tool_calls', got 'length'", NO_END),
    "image-input": ("HTTP 400 (expected [200])", NO_IMAGES),
    "anth-image-input": ("HTTP 400 (expected [200])", NO_IMAGES),
    "anth-tool-calling": ("stop_reason: expected 'tool_use', got 'max_tokens'", NO_END),
    "chat-error-handling": ("HTTP 200 (expected [400, 422])", NO_MODEL_NAMED),
    "error-handling": ("HTTP 200 (expected [400, 422])", NO_MODEL_NAMED),
}
"""Tests that fail: the first thing that the suite says, and the reason."""

SKIPPED = {"chat-reasoning-summary", "reasoning-summary", "anth-thinking-display"}
"""Tests that the suite itself leaves out, because the model's name is none of a model that reasons."""

WARNED = {"compact-response"}
"""Tests with warnings: there is no endpoint that compacts a conversation, which the suite allows."""


@pytest.fixture(scope="module")
def greedy_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Serves a model that decodes greedily by default, so that the findings are the same each time."""
    with served(tmp_path_factory.mktemp("model"), defaults={"temperature": 0}) as stack:
        yield stack


def report(command: list[str]) -> dict[str, Any]:
    """Runs a suite that prints its report as JSON."""
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=600, check=False)
    try:
        return dict(json.loads(done.stdout))
    except ValueError:
        pytest.fail(done.stdout + done.stderr)


@pytest.mark.parametrize("suite", FORMATS)
def test_llm_comply(greedy_stack: Stack, suite: str) -> None:
    greedy_stack.show_log()
    try:
        command = python_tool("llm_comply.cli")
    except NotInstalled as error:
        pytest.skip(f"llm-comply: {error}")
    flags = ["--format", suite, "--model", MODEL, "--api-key", KEY, "--timeout", "300", "--json"]
    found = report([*command, *flags, *FORMATS[suite], "--base-url", f"http://{greedy_stack.openai}/v1"])
    results = {each["id"]: each for each in found["results"]}
    assert len(results) > 5
    assert {name for name, each in results.items() if each["status"] == "skipped"} == SKIPPED & set(results)
    failed = {name: each["errors"] for name, each in results.items() if each["status"] == "failed"}
    assert {name: errors[0] for name, errors in failed.items()} == {
        name: error for name, (error, _) in FAILURES.items() if name in results
    }, failed
    warned = {name: each["warnings"] for name, each in results.items() if name not in failed and "warnings" in each}
    assert set(warned) == WARNED & set(results), warned


def test_compatcanary(greedy_stack: Stack) -> None:
    greedy_stack.show_log()
    try:
        command = node_tool("compatcanary/src/cli.js")
    except NotInstalled as error:
        pytest.skip(f"compatcanary: {error}")
    flags = ["--base-url", f"http://{greedy_stack.openai}/v1", "--model", MODEL, "--profile", "modern"]
    found = report([*command, "scan", *flags, "--timeout", "300", "--format", "json", "--fail-on", "never"])
    assert {each["id"]: each["status"] for each in found["results"]} == dict.fromkeys(
        (
            "models.list", "chat.basic", "chat.streaming", "chat.tool_call", "chat.structured_output",
            "responses.basic", "responses.streaming",
        ),
        "pass",
    ), found  # fmt: skip
    assert found["score"] == 100


def test_the_page_names_what_does_not_hold() -> None:
    section = (ROOT / "docs" / "openai.md").read_text(encoding="utf-8").partition("\n## Conformance\n")[2]
    rows = [line.split("|")[3] for line in section.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    assert [name.strip(" `") for row in rows for name in row.split(",") if name.strip()] == [
        name for suite in ("chat-", "", "anth-") for name in FAILURES if _suite(name) == suite
    ]


def _suite(name: str) -> str:
    """Returns the prefix that llm-comply gives the tests of one suite."""
    return next((prefix for prefix in ("chat-", "anth-") if name.startswith(prefix)), "")
