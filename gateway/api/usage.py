"""The usage of an answer, summed over its prompts and choices."""

from typing import Any

from quire.v1 import generation_pb2 as pb

FINISH_REASONS = {
    pb.FINISH_REASON_EOS: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_STOP: "stop",
}
"""OpenAI's finish reasons."""


class UsageCounter:
    """Counts the tokens of an answer while it arrives.

    num_reasoning_tokens  those of thoughts, by choice; stays empty if the answer is not searched for thoughts
    """

    def __init__(self) -> None:
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._completion_tokens = 0
        self.num_reasoning_tokens: dict[int, int] = {}

    def started(self, started: pb.Started) -> None:
        self._prompt_tokens += started.prompt_tokens
        self._cached_tokens += started.cached_tokens

    def generated(self, num_tokens: int) -> None:
        self._completion_tokens += num_tokens

    def as_json(self) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
        }
        if self.num_reasoning_tokens:
            usage["completion_tokens_details"] = {"reasoning_tokens": sum(self.num_reasoning_tokens.values())}
        return usage
