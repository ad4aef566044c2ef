"""Models without a checkpoint: the config.json of a known shape, and a generated tokenizer.

`quire serve --load-format random` draws the weights and transformers initialises its own, so no large file is written.
"""

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench.command_line import Parser

_COMMON = {
    "hidden_act": "silu",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "attention_bias": False,
    "initializer_range": 0.02,
    "use_cache": True,
}
_LLAMA = _COMMON | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False}
_QWEN3 = _COMMON | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "use_sliding_window": False}

SHAPES: dict[str, dict[str, Any]] = {
    # Published in the config.json of meta-llama/Llama-3.1-8B.
    "llama-3.1-8b": _LLAMA
    | {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    # Published in the config.json of Qwen/Qwen3-0.6B.
    "qwen3-0.6b": _QWEN3
    | {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    },
    # Small models of the same families, which run anywhere within seconds.
    "llama-tiny": _LLAMA
    | {
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    },
    "qwen3-tiny": _QWEN3
    | {
        "vocab_size": 1200,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "max_window_layers": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    },
}

_SPECIAL_TOKENS = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}


def write_model(shape: str, directory: Path) -> Path:
    """Writes config.json and a tokenizer that knows every id of the shape's vocabulary. Returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    config = SHAPES[shape]
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(_SPECIAL_TOKENS), encoding="utf-8")
    make_tokenizer(config["vocab_size"]).save(str(directory / "tokenizer.json"))
    return directory


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """Returns a byte-level BPE of `vocab_size` tokens: special ones, bytes, then pairs and triples of ASCII letters.

    It is not trained, but every id has a text, so detokenizing the output of a random model costs as much as usual.
    Raises ValueError for a vocabulary that is too small for the bytes, or larger than the triples can make it.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    signs = [letter for letter in letters if letter.isascii()]
    tokens = [*_SPECIAL_TOKENS.values(), *letters]
    merges = []
    for left, right in itertools.chain(
        itertools.product(signs, signs), ((a + b, c) for a, b, c in itertools.product(signs, signs, signs))
    ):
        if len(tokens) >= vocab_size:
            break
        tokens.append(left + right)
        merges.append((left, right))
    if len(tokens) != vocab_size:
        raise ValueError(f"no vocabulary of {vocab_size} tokens can be made")
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL_TOKENS.values()))
    return tokenizer


def phase_arguments(name: str, description: str | None, arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the flags of a phase that runs one shape."""
    parser = Parser(name, description)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--device", required=True, help="cpu, cuda or cuda:INDEX")
    parser.add_argument("--small", action="store_true", help="a few short requests: for tests")
    parser.add_argument("--json", type=Path, required=True, help="file of results")
    return parser.parse_args(arguments)
