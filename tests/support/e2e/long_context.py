"""A model with the shape of the embedded one and random weights, whose context holds 131,072 tokens."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from random import Random

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.e2e.stack import TINY

MAX_MODEL_LEN = 131_072
NUM_TOKENS = int(os.environ.get("LONG_PROMPT_TOKENS", "5000"))
"""Length of the long prompts in tests of real processes. 100,000 take minutes on two cores."""


def write_checkpoint(directory: Path) -> str:
    """Writes the checkpoint, and returns its directory. Its tokenizer is that of the embedded model."""
    settings = json.loads(Path(TINY, "config.json").read_text())
    # With the usual small weights, outputs hardly depend on tokens before the last one.
    settings |= {"max_position_embeddings": MAX_MODEL_LEN, "initializer_range": 0.15}
    torch.manual_seed(131)
    LlamaForCausalLM(LlamaConfig(**settings)).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(Path(TINY, name), directory / name)
    return str(directory)


def long_prompt(seed: int, num_tokens: int = NUM_TOKENS) -> list[int]:
    """Returns random token ids, none of them a control token."""
    random = Random(seed)
    return [random.randrange(300, 1600) for _ in range(num_tokens)]
