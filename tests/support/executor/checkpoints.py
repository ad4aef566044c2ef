"""Small random checkpoints of each family, made with transformers: the oracle of the decoder's tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

if TYPE_CHECKING:
    from pathlib import Path

_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    # Large enough that the logits of the most likely tokens are far apart, and these tokens differ between positions.
    "initializer_range": 0.25,
    "eos_token_id": None,
    "bos_token_id": None,
}


def _rope(kind: str, **parameters: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


_LLAMA_31 = {
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"vocab_size": 307}),
    "llama-tied": (LlamaConfig, LlamaForCausalLM, {"vocab_size": 301, "tie_word_embeddings": True}),
    "llama-biases": (
        LlamaConfig,
        LlamaForCausalLM,
        {"vocab_size": 293, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
    ),
    "llama-linear": (LlamaConfig, LlamaForCausalLM, {"vocab_size": 257, **_rope("linear", factor=2.5)}),
    "llama-dynamic": (
        LlamaConfig,
        LlamaForCausalLM,
        {"vocab_size": 257, **_rope("dynamic", factor=2.0), "max_position_embeddings": 64},
    ),
    "llama-llama3": (LlamaConfig, LlamaForCausalLM, {"vocab_size": 331, **_rope("llama3", **_LLAMA_31)}),
    "llama-yarn": (
        LlamaConfig,
        LlamaForCausalLM,
        {"vocab_size": 263, **_rope("yarn", factor=4.0, original_max_position_embeddings=32)},
    ),
    "mistral-window": (MistralConfig, MistralForCausalLM, {"vocab_size": 311, "sliding_window": 13}),
    "mistral-full": (MistralConfig, MistralForCausalLM, {"vocab_size": 269, "sliding_window": None}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"vocab_size": 283}),
    "qwen2-window": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {
            "vocab_size": 277,
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 11,
            "max_window_layers": 1,
        },
    ),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"vocab_size": 271, "head_dim": 24}),
}


@dataclass(frozen=True, slots=True)
class RandomCheckpoint:
    """A model in memory, and the same model on disk."""

    name: str
    model: PreTrainedModel
    directory: Path

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.vocab_size)

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        generator = torch.Generator().manual_seed(1000 * length + seed)
        return torch.randint(0, self.vocab_size, (length,), generator=generator).tolist()

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Returns the tokens that transformers generates for the prompt alone, without padding."""
        tokens = torch.tensor([prompt])
        output = self.model.generate(
            tokens,
            # Without a mask, tokens equal to the padding id would count as padding.
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        return output[0, len(prompt) :].tolist()

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Returns logits[len(tokens), vocab_size], computed in one pass."""
        with torch.inference_mode():
            return self.model(torch.tensor([tokens])).logits[0]


def make_checkpoint(name: str, directory: Path, **save_options: Any) -> RandomCheckpoint:
    """Makes the checkpoint with this name. The same name gives the same weights."""
    config_class, model_class, settings = FAMILIES[name]
    torch.manual_seed(len(name))
    model = model_class(config_class(**{**_SMALL, **settings})).eval()
    with torch.no_grad():
        # Norms and biases start as ones and zeros. Unless they are changed, the tests would not notice a mix-up.
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name or parameter_name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(directory, **save_options)
    return RandomCheckpoint(name, model, directory)
