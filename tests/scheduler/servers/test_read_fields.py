"""Fields of GenerateRequest are read by their descriptors, so that new fields need no code here."""

from typing import Any

import pytest

from quire.v1 import generation_pb2 as pb
from scheduler.servers.generation_server import read_fields


@pytest.mark.parametrize(
    ("request_message", "values"),
    [
        (pb.GenerateRequest(), {}),
        (pb.GenerateRequest(text=""), {"text": ""}),
        (pb.GenerateRequest(token_ids=pb.TokenIds()), {"token_ids.ids": []}),
        (
            pb.GenerateRequest(chat=pb.ChatPrompt()),
            {"chat.messages": [], "chat.tools": [], "chat.template_arguments": {}},
        ),
        (
            pb.GenerateRequest(priority=0, cache_salt="", request_id="a"),
            {"priority": 0, "cache_salt": "", "request_id": "a"},
        ),
        (pb.GenerateRequest(output=pb.OutputParams(logprobs=0)), {"output.logprobs": 0}),
    ],
)
def test_present_fields_are_read_even_if_they_are_empty(
    request_message: pb.GenerateRequest, values: dict[str, Any]
) -> None:
    assert read_fields(request_message).values == values


def test_fields_with_presence_are_absent_unless_set() -> None:
    fields = read_fields(pb.GenerateRequest(sampling=pb.SamplingParams(top_k=0), stopping=pb.StoppingParams()))
    assert "sampling.top_k" in fields
    assert "sampling.min_p" not in fields
    assert fields.get("stopping.stop") == []
    assert "stopping.max_tokens" not in fields
