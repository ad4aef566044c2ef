"""Reads the ModelShape from the config.json of a checkpoint.

Only shapes are read; whether an executor supports the model is not checked.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planning.bounded_file import read_text
from planning.errors import PlanningError
from planning.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class _Family:
    """Properties that the code of an architecture fixes.

    qkv_bias, output_bias  True or False; None: the field `attention_bias` decides
    mlp_bias               the field `mlp_bias` decides; without it, there is none
    num_kv_heads           default of `num_key_value_heads`; None: as many as there are heads
    """

    qkv_bias: bool | None
    output_bias: bool | None
    mlp_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    num_kv_heads: int | None = None


_FAMILIES = {
    "LlamaForCausalLM": _Family(None, None, mlp_bias=True),
    "MistralForCausalLM": _Family(False, False, num_kv_heads=8),
    "Qwen2ForCausalLM": _Family(True, False, num_kv_heads=32),
    "Qwen3ForCausalLM": _Family(None, None, qk_norm=True, head_dim=128, num_kv_heads=32),
}
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_MAX_BYTES = 1_000_000
_LARGEST = 1 << 32


def read_model_shape(path: Path) -> ModelShape:
    """Reads the shape of a model directory or a config.json. Raises PlanningError, which names the file and field."""
    file = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(read_text(file, _MAX_BYTES))
    except FileNotFoundError:
        raise PlanningError(f"{path}: {'no config.json' if path.is_dir() else 'no such file or directory'}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise PlanningError(f"{file}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise PlanningError(f"{file}: expected a JSON object")
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    try:
        return parse_model_shape(content, name)
    except PlanningError as error:
        raise PlanningError(f"{file}: {error}") from None


def parse_model_shape(content: Mapping[str, Any], name: str) -> ModelShape:
    """Returns the shape that the content of a config.json describes. Raises PlanningError, which names the field."""
    family = _FAMILIES[_architecture(content)]
    hidden_size, num_heads = _size(content, "hidden_size"), _size(content, "num_attention_heads")
    absent = num_heads if "num_key_value_heads" in content else family.num_kv_heads  # null: as many as heads
    num_kv_heads = _size(content, "num_key_value_heads", min(num_heads, absent or num_heads))
    if num_heads % num_kv_heads:
        raise PlanningError(f"num_key_value_heads: {num_heads} heads cannot share {num_kv_heads}")
    if content.get("head_dim") is None and family.head_dim is None and hidden_size % num_heads:
        raise PlanningError(f"num_attention_heads: {num_heads} heads do not divide a hidden_size of {hidden_size}")
    attention_bias = _flag(content, "attention_bias")
    return ModelShape(
        name=name,
        vocab_size=_size(content, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_size(content, "intermediate_size"),
        num_layers=_size(content, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_size(content, "head_dim", family.head_dim or hidden_size // num_heads),
        max_position_embeddings=_size(content, "max_position_embeddings"),
        tie_word_embeddings=_flag(content, "tie_word_embeddings"),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=attention_bias if family.output_bias is None else family.output_bias,
        mlp_bias=family.mlp_bias and _flag(content, "mlp_bias"),
        qk_norm=family.qk_norm,
        dtype=_dtype(content),
    )


def _architecture(content: Mapping[str, Any]) -> str:
    named = content.get("architectures")
    found = named[0] if isinstance(named, list) and named else _ARCHITECTURES.get(str(content.get("model_type")))
    if not isinstance(found, str) or found not in _FAMILIES:
        what = found or content.get("model_type")
        known = ", ".join(_FAMILIES)
        raise PlanningError(
            f"architecture {what!r} is not supported; supported: {known}" if what else "names no architecture"
        )
    for field in ("num_local_experts", "num_experts", "quantization_config"):
        if content.get(field) not in (None, 0):
            raise PlanningError(f"{field}: {content[field]!r} is not supported: the weights would be counted wrongly")
    return found


def _size(content: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = content.get(field)
    if value is None:
        value = default
    if value is None:
        raise PlanningError(f"{field}: missing")
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < _LARGEST:
        raise PlanningError(f"{field}: expected a positive whole number, not {value!r}")
    return value


def _flag(content: Mapping[str, Any], field: str) -> bool:
    value = content.get(field)
    if value is not None and not isinstance(value, bool):
        raise PlanningError(f"{field}: expected true or false, not {value!r}")
    return bool(value)


def _dtype(content: Mapping[str, Any]) -> str | None:
    value = content.get("dtype") or content.get("torch_dtype")
    if value is not None and not isinstance(value, str):
        raise PlanningError(f"dtype: expected a name, not {value!r}")
    return value.removeprefix("torch.") if value else None
