"""Each column of the table "Clients" in docs/openai.md: features, used with a client library from its package.

A library runs as a program of its own, in tests/gateway/clients/programs, which prints what each feature gave. The
features of a library are one test, so that its program runs once, however many workers share the suite.
"""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from quire import Client
from tests.support.e2e.stack import Stack
from tests.support.gateway.environments import PROGRAMS, NotInstalled, command_of
from tests.support.gateway.served import CHAT, MODEL, PROMPT
from tests.support.paths import ROOT

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(900)]

NUM_TOKENS = 12
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"type": "string", "enum": ["fox", "bear", "bee"]},
        "age": {"type": "integer", "minimum": 1, "maximum": 9},
        "friends": {"type": "array", "items": {"type": "string", "enum": ["Tim", "Mia"]}, "minItems": 1, "maxItems": 2},
        "is_brave": {"type": "boolean"},
    },
    "required": ["kind", "age", "friends", "is_brave"],
    "additionalProperties": False,
}
"""A schema whose texts have a bounded length, so that the embedded model reaches the end."""
CITIES = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}
CASE: dict[str, Any] = {
    "weather": {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": CITIES}},
    "other": {"type": "function", "function": {"name": "other", "description": "else", "parameters": CITIES}},
    "chat": CHAT,
    "prompt": PROMPT,
    "num_tokens": NUM_TOKENS,
    "schema": SCHEMA,
    "num_schema_tokens": 1500,
    "extra": {"allowed_token_ids": list(range(300, 400)), "repetition_penalty": 1.8, "min_tokens": 2},
    "tools": [
        {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": PARAMETERS}}
    ],
    "tool_chat": [
        {"role": "system", "content": "You tell stories."},
        {"role": "user", "content": "How is the weather?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ],
}
CLIENTS = {
    "openai": "openai_client.py",
    "openai, async": "openai_async_client.py",
    "litellm": "litellm_client.py",
    "langchain-openai": "langchain_client.py",
    "instructor": "instructor_client.py",
    "llm": "llm_client.py",
    "anthropic": "anthropic_client.py",
    "openai (npm)": "openai_client.mjs",
    "ai (npm)": "ai_client.mjs",
}
"""The program of each client."""

ERRORS = {
    "bad request": ("BadRequestError", ": must be "),
    "too long": ("BadRequestError", "2048"),
    "unknown model": ("NotFoundError", "gpt-9"),
}
"""The class of the error, and a part of its message."""
OWN_ERRORS = {
    ("litellm", "too long"): "ContextWindowExceededError",
    ("langchain-openai", "too long"): "ContextOverflowError",
    **{("ai (npm)", feature): "AI_APICallError" for feature in ERRORS},
}
"""Classes of the libraries that have their own."""


def table() -> dict[str, set[str]]:
    """Returns the features of each client that docs/openai.md promises."""
    section = (ROOT / "docs" / "openai.md").read_text(encoding="utf-8").partition("\n## Clients\n")[2]
    rows = [
        [cell.strip() for cell in line.strip()[1:-1].split("|")]
        for line in section.partition("\n## ")[0].splitlines()
        if line.startswith("|") and not line.startswith("|-")
    ]
    clients = [cell.strip("`") for cell in rows[0][1:]]
    return {client: {row[0] for row in rows[1:] if row[i + 1] == "yes"} for i, client in enumerate(clients)}


@pytest.fixture(scope="module")
def case(served_stack: Stack) -> Iterator[dict[str, Any]]:
    """Yields what the programs send, and under "expected" what the scheduler's own protocol answers."""
    with served_stack.sync_client() as client:
        yield CASE | {"stop": expected_text(client).split()[3], "expected": expected(client)}


def expected_text(client: Client, **options: Any) -> str:
    return client.complete(CHAT, **{"max_tokens": NUM_TOKENS, "temperature": 0} | options).text


def expected(client: Client) -> dict[str, Any]:
    chat = client.complete(CHAT, max_tokens=NUM_TOKENS, temperature=0)
    stop = chat.text.split()[3]
    found = {
        "chat": chat.text,
        "completion": client.complete(PROMPT, max_tokens=NUM_TOKENS, temperature=0).text,
        "several choices": list(client.complete(CHAT, max_tokens=NUM_TOKENS, temperature=1, seed=3, n=3).texts),
        "seed": expected_text(client, temperature=1, seed=5),
        "stop": chat.text[: chat.text.index(stop)],
        "usage of a stream": [chat.prompt_tokens, NUM_TOKENS],
        "fields of vLLM": expected_text(client, **CASE["extra"]),
        "models": [MODEL],
        "cancelled stream": True,
    }
    texts = [found["chat"], found["seed"], found["stop"], found["fields of vLLM"], *found["several choices"]]
    assert len(set(texts)) == len(texts), "each feature must change the text"
    return found | {"chat, streamed": found["chat"], "completion, streamed": found["completion"]}


def outcomes(client: str, gateway: str, case: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Runs a client's program, and returns what each feature gave."""
    try:
        command = command_of(CLIENTS[client], directory)
    except NotInstalled as error:
        pytest.skip(f"{client}: {error}")
    environment = {
        "GATEWAY": gateway,
        "CASE": json.dumps(case),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LANGSMITH_TRACING": "false",
        "LLM_USER_PATH": str(directory),
    }
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=300, check=False
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"feature"')]
    assert done.returncode == 0, done.stdout + done.stderr
    return {each.pop("feature"): each for each in found}


@pytest.mark.parametrize("client", table())
def test_features(stack: Stack, client: str, case: dict[str, Any], tmp_path: Path) -> None:
    found = outcomes(client, stack.openai, case, tmp_path)
    problems = {feature: problem(client, feature, found, case) for feature in sorted(table()[client])}
    assert {feature: text for feature, text in problems.items() if text} == {}


def problem(client: str, feature: str, found: dict[str, Any], case: dict[str, Any]) -> str:
    """Returns what is wrong with a feature; empty if nothing is."""
    outcome = found.get(feature, {})
    if feature in ERRORS:
        name, told = ERRORS[feature]
        *names, message = outcome.get("error", ["no error"])
        is_right = OWN_ERRORS.get((client, feature), name) in names and told in message
    else:
        is_right = "result" in outcome and is_expected(feature, outcome["result"], case["expected"])
    return "" if is_right else f"{outcome}, expected {case['expected'].get(feature, 'as the test says')}"


def is_expected(feature: str, result: Any, expected: dict[str, Any]) -> bool:
    match feature:
        case "chat, streamed" | "completion, streamed":
            pieces = [piece for piece in result if piece]
            return len(pieces) > 1 and "".join(pieces) == expected[feature]
        case "log-probabilities":
            return b"".join(map(bytes, result)).decode() == expected["chat"]
        case "tool call" | "tool call, streamed" | "named tool" | "tool runner":
            name, arguments, reason = result
            return (name, reason) == ("weather", "tool_calls") and arguments in ({"city": "Rome"}, {"city": "Paris"})
        case "tools and results":
            return bool(result) and result != expected["chat"]
        case "structured output":
            return jsonschema.Draft202012Validator(SCHEMA).is_valid(result)
        case _:
            return bool(result == expected[feature])


@pytest.mark.parametrize("client", CLIENTS)
def test_the_table_leaves_nothing_out(client: str) -> None:
    """A program has a function for each feature that the table promises, and for no other."""
    source = (PROGRAMS / CLIENTS[client]).read_text(encoding="utf-8")
    features = {feature for features in table().values() for feature in features}
    named = {
        feature
        for feature in features
        if re.search(rf'^ +("{re.escape(feature)}"|{re.escape(feature)}):', source, re.MULTILINE)
    }
    assert named == table()[client]
