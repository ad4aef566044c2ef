"""A trace: a seeded list of requests with mixed lengths.

Prompt and output lengths are log-normal, as in served traffic. `mixed` has prompts of 8 … 512 tokens with a mean of
about 130, and outputs of 4 … 384 with a mean of about 90. `sharegpt` has means of about 215 and 197, as ShareGPT
conversations in benchmarks, and at most 1,024 tokens each. `open` has one length, so that streams that begin together
stay open together. The others belong to profiles (bench/profiles.py). Prompts are random token ids, so that no result
depends on a tokenizer and no two prompts share a prefix by accident. If the model's context is shorter than the longest
request, one factor scales all lengths, so that the mix keeps its shape.
"""

import math
import random
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """A log-normal distribution: parameters of the logarithm, and the bounds of the lengths."""

    mu: float
    sigma: float
    least: int
    most: int


def _fixed(length: int) -> LengthDistribution:
    return LengthDistribution(math.log(length), 0.0, length, length)


# Distributions of prompts and of outputs, by name. A mix with several pairs uses them in turn, one for each request.
LENGTHS = {
    "mixed": [(LengthDistribution(4.6, 0.8, 8, 512), LengthDistribution(4.2, 0.9, 4, 384))],
    "sharegpt": [(LengthDistribution(5.0, 0.9, 8, 1024), LengthDistribution(4.9, 0.9, 4, 1024))],
    "open": [(_fixed(16), _fixed(384))],
    "rag": [(LengthDistribution(math.log(3500), 0.1, 3000, 4000), _fixed(64))],
    "long": [(_fixed(12_000), _fixed(64))],
    "mixed-long": [(_fixed(8_000), _fixed(200)), *[(_fixed(50), _fixed(200))] * 5],
}
# Low ids are special tokens in most vocabularies.
_NUM_RESERVED_IDS = 10


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: a prompt, and the exact number of tokens to generate for each sample."""

    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    num_samples: int = 1
    temperature: float = 0.0
    top_p: float = 1.0

    @property
    def sampling(self) -> dict[str, float]:
        """The options of sampling under the names that Quire and OpenAI's API share; defaults are left out."""
        options: dict[str, float] = {"temperature": self.temperature}
        if self.top_p < 1:
            options["top_p"] = self.top_p
        if self.num_samples > 1:
            options["n"] = self.num_samples
        return options


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """The parameters of a trace, which determine it completely.

    vocab_size         upper bound of prompt ids, exclusive
    max_model_len      maximum length of a request, prompt and output together
    num_shared_tokens  tokens that all prompts begin with, before their own (to measure prefix caching)
    lengths            a name of LENGTHS
    num_samples        samples of each request
    temperature        0: greedy
    """

    num_requests: int
    vocab_size: int
    max_model_len: int
    seed: int = 7
    num_shared_tokens: int = 0
    lengths: str = "mixed"
    num_samples: int = 1
    temperature: float = 0.0
    top_p: float = 1.0

    @property
    def scale(self) -> float:
        """Factor on all lengths; 1 if the longest possible request fits."""
        longest = max(prompts.most + outputs.most for prompts, outputs in LENGTHS[self.lengths])
        return min(1.0, (self.max_model_len - self.num_shared_tokens) / longest)


def make_trace(settings: TraceSettings) -> list[TraceRequest]:
    """Draws the trace of `settings`. Raises ValueError if the model is too small for any request."""
    lowest_id = min(_NUM_RESERVED_IDS, settings.vocab_size - 1)
    if settings.num_requests < 1 or lowest_id < 0:
        raise ValueError("a trace needs a request and a vocabulary")
    if settings.max_model_len - settings.num_shared_tokens < 2:
        raise ValueError(
            f"max_model_len {settings.max_model_len} leaves no room after {settings.num_shared_tokens} shared tokens"
        )
    kinds = LENGTHS[settings.lengths]
    rng = random.Random(settings.seed)
    shared = tuple(rng.randrange(lowest_id, settings.vocab_size) for _ in range(settings.num_shared_tokens))
    trace = []
    for i in range(settings.num_requests):
        prompts, outputs = kinds[i % len(kinds)]
        num_prompt_tokens = _length(rng, prompts, settings.scale)
        max_tokens = _length(rng, outputs, settings.scale)
        own = tuple(rng.randrange(lowest_id, settings.vocab_size) for _ in range(num_prompt_tokens))
        trace.append(TraceRequest(shared + own, max_tokens, settings.num_samples, settings.temperature, settings.top_p))
    return trace


def describe(settings: TraceSettings, trace: list[TraceRequest]) -> dict[str, object]:
    """Returns the settings and the means of the trace, for a report."""
    return {
        **asdict(settings),
        "scale": round(settings.scale, 4),
        "mean_prompt_tokens": round(sum(len(item.prompt_token_ids) for item in trace) / len(trace), 1),
        "mean_output_tokens": round(sum(item.max_tokens for item in trace) / len(trace), 1),
    }


def _length(rng: random.Random, lengths: LengthDistribution, scale: float) -> int:
    length = min(max(rng.lognormvariate(lengths.mu, lengths.sigma), lengths.least), lengths.most)
    return max(1, math.floor(length * scale))
