"""What a checkpoint says a request means that says nothing: its generation_config.json.

As vLLM does by default, its temperature, top_p, top_k, min_p and repetition_penalty take the place of what a request
leaves out, whether or not it says `do_sample`: a request without a temperature samples (at 1.0 if the file names none);
one that wants greedy decoding says temperature 0. Its length bounds, and what it says of beams, are not read.
"""

from dataclasses import dataclass
from typing import Any

from scheduler.text.checkpoint import Checkpoint, CheckpointError

# A factor of logits: beyond these, a softmax of float32 has nothing left to tell apart, or overflows.
MIN_REPETITION_PENALTY = 1 / 128
MAX_REPETITION_PENALTY = 10.0


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """top_k 0: all tokens; eos_token_ids: tokens that end a text (where there are none, it never ends by itself)"""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def load(cls, checkpoint: Checkpoint, tokenizer_eos_token_id: int | None = None) -> "GenerationDefaults":
        """EOS ids are those of generation_config.json, else of config.json, else the tokenizer's own.

        Raises CheckpointError for values that no request could have either.
        """
        config = _Values(checkpoint, "generation_config.json")
        eos_token_ids = config.token_ids("eos_token_id")
        if eos_token_ids is None:
            eos_token_ids = _Values(checkpoint, "config.json").token_ids("eos_token_id")
        if eos_token_ids is None:
            eos_token_ids = () if tokenizer_eos_token_id is None else (tokenizer_eos_token_id,)
        return cls(
            temperature=float(config.number("temperature", 0, 100, default=1.0)),
            # A top_p of 0 is how some files write "the most probable token only". So is what a float32 takes for 0, and
            # an executor would refuse.
            top_p=max(float(config.number("top_p", 0, 1, default=1.0)), 1e-6),
            top_k=max(0, int(config.number("top_k", -1, 2**31 - 1, default=0))),
            min_p=float(config.number("min_p", 0, 1, default=0.0)),
            repetition_penalty=float(
                config.number("repetition_penalty", MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY, default=1.0)
            ),
            eos_token_ids=eos_token_ids,
        )


class _Values:
    """The values of one JSON file; null is absent."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self._path = checkpoint.directory / name
        self._values: dict[str, Any] = checkpoint.json_object(name)

    def number(self, key: str, least: float, most: float, *, default: float) -> float:
        value = self._values.get(key)
        if value is None:
            return default
        # `not (least <= …)`: JSON as Python reads it has NaN.
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise CheckpointError(f"{self._path}: {key} must be a number from {least} to {most}, not {value!r}")
        return value

    def token_ids(self, key: str) -> tuple[int, ...] | None:
        value = self._values.get(key)
        if value is None:
            return None
        token_ids = value if isinstance(value, list) else [value]
        if not all(type(token_id) is int and 0 <= token_id < 2**31 for token_id in token_ids):
            raise CheckpointError(f"{self._path}: {key} must be a token id or a list of them, not {value!r}")
        return tuple(token_ids)
