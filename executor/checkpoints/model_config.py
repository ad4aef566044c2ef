"""Reads config.json of a checkpoint into the numbers that the decoder needs.

A field that requires an operation the decoder does not implement is an error; it is never ignored.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executor.checkpoints.config_fields import Fields
from executor.checkpoints.rope import (
    DefaultRope,
    DynamicNtkRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    Rope,
    YarnRope,
    longrope_attention_factor,
    yarn_attention_factor,
)
from executor.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Family:
    """The traits of an architecture that config.json leaves out or that its classes hard-wire.

    qkv_bias, output_bias   True or False; None: the field `attention_bias` decides
    has_window              `sliding_window` applies to all layers, or to those that `layer_types` chooses
    layer_windows           `use_sliding_window` and `layer_types` choose the layers with a sliding window
    mlp_bias                the field `mlp_bias` decides; without it, there is none
    num_kv_heads            default of `num_key_value_heads`; None: as many as there are heads
    """

    qkv_bias: bool | None = None
    output_bias: bool | None = None
    qk_norm: bool = False
    has_window: bool = False
    layer_windows: bool = False
    mlp_bias: bool = False
    head_dim: int | None = None
    num_kv_heads: int | None = None


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(mlp_bias=True),
    "MistralForCausalLM": Family(qkv_bias=False, output_bias=False, has_window=True, num_kv_heads=8),
    "Qwen2ForCausalLM": Family(qkv_bias=True, output_bias=False, layer_windows=True, num_kv_heads=32),
    "Qwen3ForCausalLM": Family(qk_norm=True, layer_windows=True, head_dim=128, num_kv_heads=32),
}

_ARCHITECTURE_OF_MODEL_TYPE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

# Window in tokens if config.json lacks the field. A field that is null means no window.
_ABSENT_WINDOW = 4096

# Values under which a field changes nothing. The decoder does not support any other value.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish"),
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
    "attn_logit_softcapping": (None, 0, 0.0),
    "final_logit_softcapping": (None, 0, 0.0),
    "logit_scale": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "is_causal": (True,),
    "attention_chunk_size": (None,),
    "num_local_experts": (None, 0),
    "num_experts": (None, 0),
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The dimensions of a decoder-only transformer of the Llama kind.

    windows         window of each layer in tokens, the query's own included; 0: the whole context
    qkv_bias        the projections to queries, keys and values add a bias; output_bias and mlp_bias likewise
    qk_norm         RMS norm over each head's query and key before the rotation
    dtype           "float32", "bfloat16", "float16", or None if config.json does not name one
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int, ...]
    rope: Rope
    max_position_embeddings: int
    dtype: str | None

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


def read_model_config(directory: Path) -> ModelConfig:
    """Reads config.json in a directory. Raises CheckpointError with the file and the field at fault."""
    path = directory / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{directory}: no config.json") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    try:
        return parse_model_config(content)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def parse_model_config(content: Mapping[str, Any]) -> ModelConfig:
    """Interprets config.json.

    Raises CheckpointError for an unknown architecture and for fields that are missing, wrong or not supported.
    """
    architecture = _architecture(content)
    family = FAMILIES[architecture]
    _refuse_unsupported_fields(content)
    config = Fields(content)
    hidden_size, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    absent = min(num_heads, family.num_kv_heads or num_heads)
    num_kv_heads = config.nullable_size("num_key_value_heads", absent) or num_heads
    head_dim = config.size("head_dim", family.head_dim or hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(f"{num_heads} heads cannot share {num_kv_heads} key-value heads")
    if head_dim % 2:
        raise CheckpointError(f"head_dim: must be even for the rotary embedding, is {head_dim}")
    attention_bias = config.flag("attention_bias", False)
    num_layers = config.size("num_hidden_layers")
    rope = _rope(config, head_dim)
    return ModelConfig(
        architecture=architecture,
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=attention_bias if family.output_bias is None else family.output_bias,
        mlp_bias=family.mlp_bias and config.flag("mlp_bias", False),
        qk_norm=family.qk_norm,
        windows=_windows(config, family, num_layers, rope.max_context_len),
        rope=rope,
        max_position_embeddings=config.size("max_position_embeddings"),
        dtype=_dtype(content),
    )


def _architecture(content: Mapping[str, Any]) -> str:
    named = content.get("architectures") or [_ARCHITECTURE_OF_MODEL_TYPE.get(str(content.get("model_type")))]
    architecture = named[0] if isinstance(named, list) and named else None
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        found = architecture or content.get("model_type")
        raise CheckpointError(f"architecture {found!r} is not supported; known: {', '.join(FAMILIES)}")
    # Transformers goes by model_type. Llama and Mistral have the same weights, but not the same windows.
    if _ARCHITECTURE_OF_MODEL_TYPE.get(str(content.get("model_type")), architecture) != architecture:
        raise CheckpointError(f"model_type: {content['model_type']!r} is not that of {architecture}")
    return architecture


def _refuse_unsupported_fields(content: Mapping[str, Any]) -> None:
    for name, neutral in _NEUTRAL.items():
        if name in content and content[name] not in neutral:
            raise CheckpointError(f"{name}: {content[name]!r} is not supported")


def _windows(config: Fields, family: Family, num_layers: int, max_context_len: int) -> tuple[int, ...]:
    has_any = family.has_window or family.layer_windows
    window = config.nullable_size("sliding_window", absent=_ABSENT_WINDOW if has_any else max_context_len)
    # Where the model does not read it, transformers computes prompts without it, but decodes with a cache of this size.
    if not has_any and window is not None and window < max_context_len:
        raise CheckpointError(f"sliding_window: {window} is not supported for this architecture; null means none")
    if not has_any or (family.layer_windows and not config.flag("use_sliding_window", False)):
        window = None
    if (layer_types := config.strings("layer_types")) is None:
        first = config.count("max_window_layers", 28) if family.layer_windows else 0
        return tuple((window or 0) if layer >= first else 0 for layer in range(num_layers))
    if len(layer_types) != num_layers:
        raise CheckpointError(f"layer_types: {len(layer_types)} entries for {num_layers} layers")
    if unknown := set(layer_types) - {"full_attention", "sliding_attention"}:
        raise CheckpointError(f"layer_types: {', '.join(sorted(unknown))} is not supported")
    if "sliding_attention" in layer_types and window is None:
        raise CheckpointError("layer_types: sliding_attention without a sliding_window in use")
    return tuple((window or 0) if kind == "sliding_attention" else 0 for kind in layer_types)


def _dtype(content: Mapping[str, Any]) -> str | None:
    dtype = content.get("dtype") or content.get("torch_dtype")
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _rope(config: Fields, head_dim: int) -> Rope:
    """Reads both spellings: `rope_parameters`, and the older `rope_theta` with `rope_scaling`."""
    nested, older = config.mapping("rope_parameters") or {}, config.mapping("rope_scaling") or {}
    if nested and older and nested != older:
        raise CheckpointError("rope_scaling: differs from rope_parameters; remove one of them")
    nested = nested or older
    parameters = Fields(nested, prefix="rope_parameters.")
    if nested.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise CheckpointError("rope_parameters.partial_rotary_factor is not supported")
    if any(isinstance(value, dict) for value in nested.values()):
        raise CheckpointError("rope_parameters: other angles for each kind of layer are not supported")
    kind = nested.get("rope_type") or nested.get("type") or "default"
    theta = parameters.positive("rope_theta", config.positive("rope_theta", 10000.0))
    reach = config.size("max_position_embeddings")
    original = config.size(
        "original_max_position_embeddings", parameters.size("original_max_position_embeddings", reach)
    )
    match kind:
        case "default":
            return DefaultRope(theta, reach)
        case "linear":
            return LinearRope(theta, parameters.positive("factor"), reach)
        case "dynamic":
            if head_dim == 2:
                raise CheckpointError("head_dim: must be above 2 for rope scaling 'dynamic'")
            return DynamicNtkRope(theta, parameters.positive("factor"), reach)
        case "llama3":
            return Llama3Rope(
                theta=theta,
                factor=parameters.positive("factor"),
                low_freq_factor=parameters.positive("low_freq_factor"),
                high_freq_factor=parameters.positive("high_freq_factor"),
                original_max_position_embeddings=original,
                max_context_len=reach,
            )
        case "yarn":
            return _yarn(parameters, theta, reach, original, truncate="truncate" not in nested)  # null is false
        case "longrope":
            return _longrope(parameters, theta, reach, original, head_dim)
        case _:
            raise CheckpointError(f"rope scaling {kind!r} is not supported")


def _yarn(parameters: Fields, theta: float, reach: int, original: int, truncate: bool) -> YarnRope:
    if theta == 1:
        raise CheckpointError("rope_theta: must not be 1 for rope scaling 'yarn'")
    factor = parameters.positive("factor", reach / original)
    mscale, mscale_all_dim = parameters.number("mscale", 0.0), parameters.number("mscale_all_dim", 0.0)
    if mscale and mscale_all_dim:
        inferred = yarn_attention_factor(factor, mscale) / yarn_attention_factor(factor, mscale_all_dim)
    else:
        inferred = yarn_attention_factor(factor)
    return YarnRope(
        theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        max_position_embeddings=reach,
        attention_factor=parameters.number("attention_factor", inferred),
        beta_fast=parameters.number("beta_fast", 32.0) or 32.0,
        beta_slow=parameters.number("beta_slow", 1.0) or 1.0,
        truncate=parameters.flag("truncate", truncate),
    )


def _longrope(parameters: Fields, theta: float, reach: int, original: int, head_dim: int) -> LongRope:
    if original == 1:
        raise CheckpointError("original_max_position_embeddings: must be above 1 for rope scaling 'longrope'")
    factor = parameters.positive("factor", reach / original)
    short, long = parameters.numbers("short_factor"), parameters.numbers("long_factor")
    if not len(short) == len(long) == head_dim // 2:
        raise CheckpointError(f"rope_parameters: short_factor and long_factor need {head_dim // 2} numbers each")
    return LongRope(
        theta=theta,
        short_factor=short,
        long_factor=long,
        original_max_position_embeddings=original,
        max_context_len=max(reach, int(original * factor)),
        attention_factor=parameters.number("attention_factor", longrope_attention_factor(factor, original)),
    )
