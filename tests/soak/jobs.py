"""All kinds of requests, each with a seed or greedy, so that their output can be compared."""

from random import Random
from typing import Any

from quire import ChatMessage
from tests.support.e2e.streams import OPENINGS, Job

_KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8},
    {"temperature": 1.1, "top_p": 0.9},
    {"temperature": 0.9, "top_k": 20, "min_p": 0.02},
    {"temperature": 0.8, "n": 3},
    {"temperature": 0.7, "repetition_penalty": 1.3},
    {"temperature": 0.7, "frequency_penalty": 0.5, "presence_penalty": 0.4},
    {"temperature": 0, "logit_bias": {300: 5.0, 301: -5.0}},
    {"temperature": 0.9, "allowed_token_ids": list(range(260, 700))},
    {"temperature": 0.8, "stop": ["The end", "she said", "."], "min_tokens": 30, "include_stop": True},
    {"temperature": 0.8, "stop_token_ids": [300, 301, 302], "min_tokens": 20, "n": 2},
    {"temperature": 0, "logprobs": 3, "prompt_logprobs": 2},
    {"temperature": 0.6, "ignore_eos": False, "min_tokens": 10},
    {"beam_width": 3},
    {"beam_width": 4, "n": 2, "length_penalty": 0.8},
    {"temperature": 0.8, "json_object": True, "ignore_eos": False},
    {"temperature": 0.9, "regex": "[A-Z][a-z]{2,6}( (and|or) [a-z]{2,6}){1,4}[.!]", "n": 2, "ignore_eos": False},
    {"beam_width": 3, "choice": ["the fox", "the owl", "the fox and the owl"], "ignore_eos": False},
)


def jobs(num_jobs: int, seed: int) -> list[Job]:
    """Returns jobs of every kind in turn, with prompts as text, chats and token ids, short and of many blocks."""
    return [_job(Random(f"job {seed} {number}"), number) for number in range(num_jobs)]


def _job(random: Random, number: int) -> Job:
    kind = _KINDS[number % len(_KINDS)]
    options: dict[str, Any] = {"ignore_eos": True, "max_tokens": random.choice((1, 20, 60, 150, 300))} | kind
    options["max_tokens"] = max(options["max_tokens"], options.get("min_tokens", 0))
    if "beam_width" in kind:
        options["max_tokens"] = random.choice((8, 24, 48))
    elif kind["temperature"]:
        options["seed"] = random.getrandbits(32)
    text = " ".join(random.choices(OPENINGS, k=random.choice((1, 1, 2, 8, 30))))
    prompt = random.choice(
        (text, text, [ChatMessage("user", text)], random.choices(range(260, 1600), k=len(text) // 4))
    )
    return Job(prompt, options)
