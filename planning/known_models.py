"""Shapes of well-known checkpoints, from their config.json, so that planning needs no download."""

from pathlib import Path

from planning.config_file import read_model_shape
from planning.errors import PlanningError
from planning.model_shape import ModelShape

_LLAMA_3_70B = ModelShape(
    "llama-3-70b", 128_256, 8_192, 28_672, 80, 64, 8, 128, max_position_embeddings=8_192, dtype="bfloat16"
)

KNOWN_MODELS = {
    shape.name: shape
    for shape in (
        ModelShape(
            "llama-2-7b", 32_000, 4_096, 11_008, 32, 32, 32, 128, max_position_embeddings=4_096, dtype="float16"
        ),
        ModelShape(
            "llama-3.1-8b", 128_256, 4_096, 14_336, 32, 32, 8, 128, max_position_embeddings=131_072, dtype="bfloat16"
        ),
        _LLAMA_3_70B,
        ModelShape(
            "llama-3.1-70b", 128_256, 8_192, 28_672, 80, 64, 8, 128, max_position_embeddings=131_072, dtype="bfloat16"
        ),
        ModelShape(
            "mistral-7b", 32_000, 4_096, 14_336, 32, 32, 8, 128, max_position_embeddings=32_768, dtype="bfloat16"
        ),
        ModelShape(
            "qwen2.5-7b",
            *(152_064, 3_584, 18_944, 28, 28, 4, 128),
            max_position_embeddings=131_072,
            qkv_bias=True,
            dtype="bfloat16",
        ),
        ModelShape(
            "qwen3-0.6b",
            *(151_936, 1_024, 3_072, 28, 16, 8, 128),
            max_position_embeddings=40_960,
            tie_word_embeddings=True,
            qk_norm=True,
            dtype="bfloat16",
        ),
        ModelShape(
            "qwen3-8b",
            *(151_936, 4_096, 12_288, 36, 32, 8, 128),
            max_position_embeddings=40_960,
            qk_norm=True,
            dtype="bfloat16",
        ),
    )
}


def find_model(model: str) -> ModelShape:
    """Returns the shape of a known model, a model directory, or a config.json. Raises PlanningError."""
    known = KNOWN_MODELS.get(model.lower())
    if known is not None:
        return known
    try:
        path = Path(model).expanduser()
        exists = path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # no permission, an unknown user, a name that is too long
        raise PlanningError(f"{model}: {error}") from None
    if not exists:
        names = ", ".join(KNOWN_MODELS)
        raise PlanningError(f"{model}: no such file or directory, and no model known by that name ({names})")
    return read_model_shape(path)
