"""Defaults from the checkpoint's generation_config.json.

Sampling parameters in the file replace the defaults of requests, as in vLLM, whatever the file's `do_sample` is. A
request without a temperature therefore samples (at 1.0 unless the file has another); greedy decoding needs temperature
0 in the request. Bounds of length and beam search parameters in the file are ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from scheduler.requests.sampling_params import SAMPLING_PARAMS, SamplingParam
from scheduler.text.checkpoint import Checkpoint, CheckpointError

FILE_MINIMUMS = {"top_p": (0, 1e-6), "top_k": (-1, 0)}
"""Minimum value in files, and the minimum that requests may use, for parameters where the two differ.

Some files write a top_p of 0 for "the most probable token only" and a top_k of -1 for "all tokens". A top_p of 1e-6 is
above 0 as a float32 too, which executors require.
"""


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Values for fields that requests leave out.

    sampling        values of sampling parameters that the checkpoint names, by name
    eos_token_ids   tokens that end a text; if there are none, a text ends only at its maximum length
    max_tokens      from the operator, for the tenant; less if less fits. None: as many as fit
    num_samples     the same for n
    """

    sampling: Mapping[str, float] = field(default_factory=dict)
    eos_token_ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    num_samples: int = 1

    @classmethod
    def load(cls, checkpoint: Checkpoint, tokenizer_eos_token_id: int | None = None) -> "GenerationDefaults":
        """Reads generation_config.json. EOS ids come from there, or from config.json, and always from the tokenizer.

        Models that were trained on chats often keep the ids of their base model in the files, and only their tokenizer
        names the token that ends an answer. Raises CheckpointError for values that a request could not have either.
        """
        config = _Values(checkpoint, "generation_config.json")
        eos_token_ids = config.token_ids("eos_token_id")
        if eos_token_ids is None:
            eos_token_ids = _Values(checkpoint, "config.json").token_ids("eos_token_id")
        eos_token_ids = eos_token_ids or ()
        if tokenizer_eos_token_id is not None and tokenizer_eos_token_id not in eos_token_ids:
            eos_token_ids += (tokenizer_eos_token_id,)
        values = {param.name: config.number(param) for param in SAMPLING_PARAMS if param.in_checkpoint}
        sampling = {name: value for name, value in values.items() if value is not None}
        return cls(sampling, eos_token_ids)

    def value_of(self, param: SamplingParam) -> float:
        """Returns the value of a parameter that a request leaves out."""
        return self.sampling.get(param.name, param.default)


class _Values:
    """The values of one JSON file. A null counts as absent."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self._path = checkpoint.directory / name
        self._values: dict[str, Any] = checkpoint.json_object(name)

    def number(self, param: SamplingParam) -> float | None:
        value = self._values.get(param.name)
        if value is None:
            return None
        minimum, allowed_minimum = FILE_MINIMUMS.get(param.name, (param.minimum, param.minimum))
        # Written as `not (minimum <= …)` because Python's JSON has NaN.
        if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value <= param.maximum:
            raise CheckpointError(
                f"{self._path}: {param.name} must be a number from {minimum} to {param.maximum}, not {value!r}"
            )
        value = max(value, allowed_minimum)
        return int(value) if param.is_integer else float(value)

    def token_ids(self, key: str) -> tuple[int, ...] | None:
        value = self._values.get(key)
        if value is None:
            return None
        token_ids = value if isinstance(value, list) else [value]
        if not all(type(token_id) is int and 0 <= token_id < 2**31 for token_id in token_ids):
            raise CheckpointError(f"{self._path}: {key} must be a token id or a list of them, not {value!r}")
        return tuple(token_ids)
