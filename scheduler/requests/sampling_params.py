"""The numbers of a request that change how the executor samples, one row each."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParam:
    """One number with the same name in `quire.v1.SamplingParams`, generation_config.json and `SequenceParams`.

    minimum, maximum   inclusive bounds
    default            used if neither the request nor the checkpoint has the number
    exclude_minimum    the number must be greater than the minimum
    is_integer         the number is a whole number; otherwise it is a float32
    in_checkpoint      generation_config.json may replace the default
    in_beam_search     replaces the number in a beam search, which draws no random numbers; None: no replacement
    """

    name: str
    minimum: float
    maximum: float
    default: float
    exclude_minimum: bool = False
    is_integer: bool = False
    in_checkpoint: bool = False
    in_beam_search: float | None = None


SAMPLING_PARAMS = (
    SamplingParam("temperature", 0, 100.0, 1.0, in_checkpoint=True, in_beam_search=0.0),
    SamplingParam("top_p", 0, 1, 1.0, exclude_minimum=True, in_checkpoint=True, in_beam_search=1.0),
    SamplingParam("top_k", 0, 2**32 - 1, 0, is_integer=True, in_checkpoint=True, in_beam_search=0),
    SamplingParam("min_p", 0, 1, 0.0, in_checkpoint=True, in_beam_search=0.0),
    # Logits are multiplied or divided by it. Beyond these bounds a float32 softmax overflows or is 0 almost everywhere.
    SamplingParam("repetition_penalty", 1 / 128, 10.0, 1.0, in_checkpoint=True),
    SamplingParam("frequency_penalty", -2.0, 2.0, 0.0),
    SamplingParam("presence_penalty", -2.0, 2.0, 0.0),
)
