"""The JSON log of a whole server: every line can be parsed."""

import json
import re
from collections import Counter

from tests.support.e2e.process import ROOT
from tests.support.e2e.stack import Stack

PROMPT = "Once upon a xyzzy"


async def test_every_line_is_json_and_each_request_has_one_line() -> None:
    async with Stack(log_format="json") as stack, stack.client() as client:
        completion = await client.complete(PROMPT, max_tokens=5, temperature=0.0)
        await stack.stop()
    printed = stack.serve.log().splitlines()
    lines = [line for line in printed if not line.startswith("ready ")]  # the ready line is for the parent process
    assert len(lines) < len(printed)
    records = [json.loads(line) for line in lines]
    assert {record["service"] for record in records} == {"scheduler", "executor", "supervisor"}
    assert all({"event", "level", "timestamp"} <= set(record) for record in records)
    (ended,) = [record for record in records if record["event"] == "request ended"]
    assert ended["request_id"] == "quire-1"
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    assert set(ended) | {"trace_id"} == set(json.loads(example))
    assert (ended["reason"], ended["generated_tokens"]) == ("length", 5)
    assert Counter(record["level"] for record in records)["error"] == 0
    text = "\n".join(printed)
    assert "xyzzy" not in text
    assert completion.text.strip() not in text
