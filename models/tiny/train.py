"""Trains the embedded checkpoint from scratch: generates stories, trains tokenizer and model, writes the files.

Run `python -m models.tiny.train` in the repository's root; it writes the checkpoint next to this file. The defaults of
the flags are the values that made the checkpoint in the repository. `training.json` records them and the losses.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass, fields
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from quire.checksums import write_manifest

from .stories import Story, documents, texts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .stories import Document

PAD, BOS, EOS, USER, ASSISTANT = "<|pad|>", "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (PAD, BOS, EOS, USER, ASSISTANT)  # ids 0 to 4, in this order

# A system message is refused, because the training data has none and the model would ignore it.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<|user|>' + message['content'] | trim }}"
    "{% elif message['role'] == 'assistant' %}{{ '<|assistant|>' + message['content'] | trim + eos_token }}"
    "{% else %}{{ raise_exception('the roles are user and assistant, not ' + message['role']) }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings that determine the checkpoint; lengths are in tokens."""

    seed: int = 1
    vocab_size: int = 2048
    hidden_size: int = 192
    intermediate_size: int = 384
    num_layers: int = 6
    num_heads: int = 6
    num_kv_heads: int = 3
    head_dim: int = 32
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    tokenizer_documents: int = 20000
    window: int = 512
    long_every: int = 8
    step_tokens: int = 2048
    steps: int = 2800
    warmup_steps: int = 100
    learning_rate: float = 2e-3
    weight_decay: float = 0.05
    clip_norm: float = 1.0
    heldout_windows: int = 64
    threads: int = 1
    autocast: bool = True


def train_tokenizer(settings: Settings) -> Tokenizer:
    """Trains a byte-level BPE whose merges are learned from ASCII text only.

    Every other character therefore stays split into its UTF-8 bytes, one token each, so that names, dashes, quotes and
    emoji test the detokenizer of streams.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    corpus = islice(documents(settings.seed), settings.tokenizer_documents)
    ascii_texts = (text.encode("ascii", "ignore").decode() for document in corpus for text in texts(document))
    tokenizer.train_from_iterator(ascii_texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def encode(tokenizer: Tokenizer, document: Document) -> list[int]:
    """Encodes one document with the special tokens that the chat template and the tokenizer's BOS would add."""
    if isinstance(document, Story):
        marked = f"{BOS}{document.text}{EOS}"
    else:
        marked = BOS + "".join(f"{USER}{turn.user}{ASSISTANT}{turn.assistant}{EOS}" for turn in document)
    ids: list[int] = tokenizer.encode(marked, add_special_tokens=False).ids
    return ids


def windows(tokenizer: Tokenizer, stream: Iterator[Document], length: int) -> Iterator[list[int]]:
    """Yields windows of `length` + 1 tokens; each begins with a whole document, and the last document is cut off."""
    while True:
        ids: list[int] = []
        while len(ids) <= length:
            ids += encode(tokenizer, next(stream))
        yield ids[: length + 1]


def batches(settings: Settings, tokenizer: Tokenizer, seed: int) -> Iterator[torch.Tensor]:
    """Yields token ids[batch, length + 1] without end; every `long_every`-th batch has windows of maximum length."""
    stream = documents(seed)
    step = 0
    while True:
        step += 1
        length = settings.max_position_embeddings if step % settings.long_every == 0 else settings.window
        rows = islice(windows(tokenizer, stream, length), settings.step_tokens // length)
        yield torch.tensor(list(rows))


def build_model(settings: Settings, vocab_size: int) -> LlamaForCausalLM:
    """Returns a new model in float32 with random weights."""
    torch.manual_seed(settings.seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_kv_heads,
        head_dim=settings.head_dim,
        max_position_embeddings=settings.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": settings.rope_theta},
        tie_word_embeddings=True,
        pad_token_id=SPECIAL_TOKENS.index(PAD),
        bos_token_id=SPECIAL_TOKENS.index(BOS),
        eos_token_id=SPECIAL_TOKENS.index(EOS),
        dtype="float32",
    )
    return LlamaForCausalLM(config)


def loss_of(model: LlamaForCausalLM, batch: torch.Tensor, autocast: bool) -> torch.Tensor:
    """Returns the mean cross entropy in nats per token of token ids[batch, length + 1]."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def rate_factor(settings: Settings, step: int) -> float:
    """Returns the factor of the learning rate: linear warm-up, then a cosine down to a hundredth."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    progress = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress))


@torch.no_grad()
def heldout_loss(settings: Settings, model: LlamaForCausalLM, tokenizer: Tokenizer) -> float:
    """Returns the loss in float32 on documents of a seed that training does not use."""
    rows = islice(windows(tokenizer, documents(settings.seed + 1_000_000), settings.window), settings.heldout_windows)
    losses = [float(loss_of(model, torch.tensor([row]), autocast=False)) for row in rows]
    return sum(losses) / len(losses)


def train(settings: Settings, model: LlamaForCausalLM, tokenizer: Tokenizer) -> float:
    """Trains in place and returns the mean loss of the last fiftieth of the steps."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=settings.learning_rate,
        betas=(0.9, 0.95),
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_factor(settings, step))
    losses: list[float] = []
    started = time.monotonic()
    model.train()
    for step, batch in enumerate(islice(batches(settings, tokenizer, settings.seed), settings.steps)):
        loss = loss_of(model, batch, settings.autocast)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        losses.append(float(loss.detach()))
        if step % 20 == 0 or step + 1 == settings.steps:
            recent = losses[-20:]
            print(
                f"step {step + 1}/{settings.steps}  loss {sum(recent) / len(recent):.4f}"
                f"  {(step + 1) * settings.step_tokens / (time.monotonic() - started):.0f} tokens/s",
                flush=True,
            )
    model.eval()  # type: ignore[no-untyped-call]
    last = losses[-max(1, settings.steps // 50) :]
    return sum(last) / len(last)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes an indented JSON file."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def save(output: Path, settings: Settings, model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    """Writes weights, both configurations, the tokenizer, and the digests of all of them."""
    output.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
    )
    model.save_pretrained(output)
    tokenizer.save(str(output / "tokenizer.json"), pretty=False)
    write_json(
        output / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "pad_token": PAD,
            "add_bos_token": True,
            "padding_side": "left",
            "clean_up_tokenization_spaces": False,
            "model_max_length": settings.max_position_embeddings,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    write_manifest(output)


def parse() -> tuple[Settings, Path]:
    """Parses the flags, one for each setting, and the output folder."""
    parser = argparse.ArgumentParser(description="train the embedded checkpoint", allow_abbrev=False)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent)
    for field in fields(Settings):
        flag = f"--{field.name.replace('_', '-')}"
        if isinstance(field.default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=field.default)
        else:
            parser.add_argument(flag, type=type(field.default), default=field.default)
    values = vars(parser.parse_args())
    output: Path = values.pop("output")
    return Settings(**values), output


def main() -> None:
    """Trains and saves the checkpoint."""
    settings, output = parse()
    torch.set_num_threads(settings.threads)
    torch.use_deterministic_algorithms(True)
    tokenizer = train_tokenizer(settings)
    # The width of the logits is rounded up; the ids after the tokenizer's last one never occur in training.
    vocab_size = math.ceil(tokenizer.get_vocab_size() / 64) * 64
    model = build_model(settings, vocab_size)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{tokenizer.get_vocab_size()} tokens, {num_parameters} parameters", flush=True)
    started = time.monotonic()
    final_loss = train(settings, model, tokenizer)
    save(output, settings, model, tokenizer)
    summary = {
        "settings": asdict(settings),
        "num_parameters": num_parameters,
        "tokenizer_tokens": tokenizer.get_vocab_size(),
        "trained_tokens": settings.steps * settings.step_tokens,
        "final_training_loss": round(final_loss, 4),
        "heldout_loss": round(heldout_loss(settings, model, tokenizer), 4),
        "training_s": round(time.monotonic() - started),
        "torch": torch.__version__,
    }
    write_json(output / "training.json", summary)
    print(json.dumps(summary, indent=2))


if __name__ == "__main__":
    main()
