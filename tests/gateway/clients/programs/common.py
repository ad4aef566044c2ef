"""Runs a program of a client library: one function for each feature, whose result or error it prints as a line of JSON.

A program runs in the environment of its library, which does not have the packages of the project.
"""

import json
import os
import re
import time
import urllib.request
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

ADDRESS = os.environ["GATEWAY"]
URL = f"http://{ADDRESS}/v1"
KEY = "no key is needed"
MODEL = "tiny"
CASE = json.loads(os.environ["CASE"])
CHAT, TOOL_CHAT, TOOLS = CASE["chat"], CASE["tool_chat"], CASE["tools"]
PROMPT, STOP, EXTRA = CASE["prompt"], CASE["stop"], CASE["extra"]
NUM_TOKENS = CASE["num_tokens"]
SCHEMA, NUM_SCHEMA_TOKENS = CASE["schema"], CASE["num_schema_tokens"]
WEATHER, OTHER = CASE["weather"], CASE["other"]
NAMED = {"type": "function", "function": {"name": "weather"}}
"""Tools whose arguments are one of a few words, so that a call is short whatever the model thinks of it."""


class Animal(BaseModel, extra="forbid"):
    """A model whose JSON schema means the same as SCHEMA."""

    kind: Literal["fox", "bear", "bee"]
    age: Annotated[int, Field(ge=1, le=9)]
    friends: Annotated[list[Literal["Tim", "Mia"]], Field(min_length=1, max_length=2)]
    is_brave: bool


def run(features: dict[str, Callable[[], object]]) -> None:
    for name, function in features.items():
        try:
            found = {"result": function()}
        except Exception as error:  # noqa: BLE001 - whatever the library raises is the result
            found = {"error": [*(each.__name__ for each in type(error).__mro__), str(error)]}
        print(json.dumps({"feature": name} | found), flush=True)


def joined_call(chunks: Iterable[Any]) -> list[Any]:
    """Returns name and arguments of the call that the chunks of a stream make together, and the finish reason."""
    name, arguments, reason = "", "", None
    for chunk in chunks:
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or []:
                name += call.function.name or ""
                arguments += call.function.arguments or ""
    return [name, json.loads(arguments), reason]


def one_call(choice: Any) -> list[Any]:
    """Returns name and arguments of the only call of a choice, and the finish reason."""
    (call,) = choice.message.tool_calls
    return [call.function.name, json.loads(call.function.arguments), choice.finish_reason]


def num_disconnects() -> int:
    """Returns how many clients have gone away before their answer ended."""
    with urllib.request.urlopen(f"http://{ADDRESS}/metrics") as response:
        found = re.search(r"^quire_gateway_disconnects_total ([\d.]+)$", response.read().decode(), re.MULTILINE)
    return int(float(found.group(1))) if found else -1


def cancelled(begin_and_leave: Callable[[], None]) -> bool:
    """Returns whether the gateway notices that a client leaves its stream, which would last much longer."""
    before = num_disconnects()
    begin_and_leave()
    until_s = time.monotonic() + 20
    while num_disconnects() == before and time.monotonic() < until_s:
        time.sleep(0.02)
    return num_disconnects() == before + 1
