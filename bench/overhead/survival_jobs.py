"""Requests of every kind whose answer is known: the same request gives the same answer again."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from quire.events import ChatMessageDict, Completion, Prompt, Usage
from quire.options import GenerateOptions

OPENINGS = (
    "Once upon a time",
    "One day, a little fox",
    "In a small village by the sea there lived",
    "It was a cold morning.",
    "Ein kleiner Bär aß süße Äpfel 🐻🍎",
)
_TOKEN_IDS = tuple(range(10, 70))
_CHAT: Sequence[ChatMessageDict] = ({"role": "user", "content": "Tell me a story about a brave mouse."},)

KINDS: dict[str, GenerateOptions] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.0, "top_p": 0.95},
    "top-k": {"temperature": 0.8, "top_k": 20},
    "three samples": {"temperature": 1.0, "n": 3},
    "penalties": {"temperature": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.3},
    "biased": {"temperature": 1.0, "logit_bias": {17: 2.0, 40: -5.0}},
    "stop string": {"temperature": 0.7, "stop": ["The end", "she said", "."]},
    "stop id": {"temperature": 1.0, "stop_token_ids": [17, 40, 80]},
    "log-probabilities": {"temperature": 0.8, "logprobs": 3},
    "prompt log-probabilities": {"temperature": 0, "logprobs": 0, "prompt_logprobs": 2},
    "cut characters": {"temperature": 5.0},
    "token ids": {"temperature": 0.9},
    "chat": {"temperature": 0.9},
    "beams": {"beam_width": 3, "n": 2, "max_tokens": 40},
}
"""The options of each kind, beside seed, `max_tokens` and `ignore_eos`."""


@dataclass(frozen=True, slots=True)
class Job:
    """A request, and the name of its kind."""

    kind: str
    prompt: Prompt
    options: GenerateOptions


def jobs(number: int, num_tokens: int, seed: int) -> list[Job]:
    """Returns this many requests of all kinds in turn. Each has its own seed and asks for about `num_tokens`."""
    kinds = list(KINDS)
    return [_job(kinds[index % len(kinds)], index, num_tokens, seed) for index in range(number)]


def _job(kind: str, index: int, num_tokens: int, seed: int) -> Job:
    options: GenerateOptions = {"max_tokens": num_tokens + index % 7, "ignore_eos": True}
    if kind.startswith("stop"):
        options["min_tokens"] = num_tokens // 2
    if kind != "beams":
        options["seed"] = seed * 1000 + index
    opening = OPENINGS[index % len(OPENINGS)]
    prompts: dict[str, Prompt] = {"token ids": _TOKEN_IDS[: 8 + index % 50], "chat": _CHAT}
    return Job(kind, prompts.get(kind, opening), options | KINDS[kind])


def comparable(completion: Completion) -> Completion:
    """Returns the completion without what depends on other requests: its id, cached tokens and preemptions."""
    sequences = tuple(
        replace(each, usage=Usage(each.usage.prompt_tokens, each.usage.completion_tokens, 0, 0))
        for each in completion.sequences
    )
    return replace(completion, request_id="", cached_tokens=0, sequences=sequences)


def differences(actual: Completion, expected: Completion) -> Iterator[str]:
    """Yields a line for each sequence or field that differs."""
    if actual.prompt_logprobs != expected.prompt_logprobs:
        yield "prompt log-probabilities"
    if len(actual.sequences) != len(expected.sequences):
        yield f"{len(actual.sequences)} sequences instead of {len(expected.sequences)}"
    for is_, should_be in zip(actual.sequences, expected.sequences, strict=False):
        for name in ("token_ids", "text", "reason", "usage", "logprobs", "score"):
            if getattr(is_, name) != getattr(should_be, name):
                yield f"sequence {is_.index}: {name} {_first_difference(getattr(is_, name), getattr(should_be, name))}"


def _first_difference(actual: object, expected: object) -> str:
    if not isinstance(actual, str | tuple) or not isinstance(expected, str | tuple):
        return f"{actual!r} instead of {expected!r}"
    pairs = enumerate(zip(actual, expected, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(actual), len(expected)))
    return f"differ at {at}: {actual[at : at + 8]!r} instead of {expected[at : at + 8]!r}"
