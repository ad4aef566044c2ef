"""The package `llm`, with the server as one of its extra models."""

import json
import os
from typing import Any

from common import CHAT, MODEL, NUM_SCHEMA_TOKENS, NUM_TOKENS, PROMPT, SCHEMA, STOP, URL, run

DIRECTORY = os.environ["LLM_USER_PATH"]
with open(os.path.join(DIRECTORY, "extra-openai-models.yaml"), "w", encoding="utf-8") as file:
    for name, model, options in (
        ("chat", MODEL, "  supports_schema: true\n"),
        ("text", MODEL, "  completion: true\n"),
        ("absent", "gpt-9", ""),
    ):
        file.write(f"- model_id: {name}\n  model_name: {model}\n  api_base: {URL}\n{options}")

import llm  # noqa: E402 - it reads the file above when it is imported

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": NUM_TOKENS, "key": "none"}


def answer(name: str = "chat", prompt: str = CHAT[0]["content"], *, stream: bool = False, **fields: Any) -> Any:
    return llm.get_model(name).prompt(prompt, stream=stream, **GREEDY | fields)


def usage() -> list[int]:
    found = answer(stream=True)
    list(found)
    return [found.usage().input, found.usage().output]


run(
    {
        "chat": lambda: answer().text(),
        "chat, streamed": lambda: list(answer(stream=True)),
        "completion": lambda: answer("text", PROMPT).text(),
        "completion, streamed": lambda: list(answer("text", PROMPT, stream=True)),
        "seed": lambda: answer(seed=5, temperature=1).text(),
        "stop": lambda: answer(stop=STOP).text(),
        "usage of a stream": usage,
        "structured output": lambda: json.loads(answer(schema=SCHEMA, max_tokens=NUM_SCHEMA_TOKENS).text()),
        "bad request": lambda: answer(max_tokens=-1).text(),
        "too long": lambda: answer(max_tokens=4000).text(),
        "unknown model": lambda: answer("absent").text(),
    }
)
