"""The embedded checkpoint in `transformers`: it loads, tells stories, and ends them with EOS."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from models.tiny.stories import vocabulary, words
from tests.support.paths import ROOT

FOLDER = ROOT / "models" / "tiny"
MAX_FOLDER_BYTES = 12_000_000
MAX_STORY_TOKENS = 400
SPECIAL_TOKENS = ["<|pad|>", "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>"]
PROMPTS = [
    "Once upon a time",
    "Once upon a time, there was a brave fox named Zoë.",
    "Long ago,",
    "Björn was a shy bear.",
    "There once was",
    "The Owl and the Silver Bell\n\n",
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(FOLDER).eval()  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module")
def grammar() -> set[str]:
    return vocabulary()


def complete(model: Any, prompt_ids: list[int]) -> list[int]:
    """Returns the greedy completion, including EOS if the model generated it."""
    output = model.generate(torch.tensor([prompt_ids]), do_sample=False, max_new_tokens=MAX_STORY_TOKENS)
    ids: list[int] = output[0, len(prompt_ids) :].tolist()
    return ids


def test_the_folder_is_small() -> None:
    total_bytes = sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file())
    assert total_bytes < MAX_FOLDER_BYTES


def test_the_configuration_matches_the_tokenizer(tokenizer: Any) -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    generation = GenerationConfig.from_pretrained(FOLDER)
    assert tokenizer.convert_tokens_to_ids(SPECIAL_TOKENS) == [0, 1, 2, 3, 4]
    for source in (config, generation.to_dict()):
        assert source["pad_token_id"] == tokenizer.pad_token_id == 0
        assert source["bos_token_id"] == tokenizer.bos_token_id == 1
        assert source["eos_token_id"] == tokenizer.eos_token_id == 2
    assert config["vocab_size"] >= len(tokenizer)
    assert config["max_position_embeddings"] == tokenizer.model_max_length
    assert config["num_attention_heads"] == 2 * config["num_key_value_heads"]


def test_weights_are_float32_and_tied(model: Any) -> None:
    with safe_open(FOLDER / "model.safetensors", "pt") as weights:
        names = set(weights.keys())
        assert {weights.get_tensor(name).dtype for name in names} == {torch.float32}
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_training_record_matches_the_weights(model: Any, tokenizer: Any) -> None:
    record = json.loads((FOLDER / "training.json").read_text())
    assert record["num_parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert record["tokenizer_tokens"] == len(tokenizer)
    assert record["settings"]["hidden_size"] == model.config.hidden_size
    assert record["settings"]["num_layers"] == model.config.num_hidden_layers


@pytest.mark.parametrize("text", ["Zoë — Jürgen “Søren” 🦊", "Once upon a time", "日本語\n\ttab  two spaces", ""])
def test_decoding_restores_the_text(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_each_byte_of_a_multibyte_character_is_one_token(tokenizer: Any) -> None:
    for character in "ëöø—“🦊":
        ids = tokenizer.encode(character, add_special_tokens=False)
        assert len(ids) == len(character.encode())
        assert "�" in tokenizer.decode(ids[:1])


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_greedy_story_ends_with_eos_and_uses_words_of_the_grammar(
    model: Any, tokenizer: Any, grammar: set[str], prompt: str
) -> None:
    ids = complete(model, tokenizer.encode(prompt))
    assert ids[-1] == tokenizer.eos_token_id
    assert len(ids) > 40
    story = prompt + tokenizer.decode(ids, skip_special_tokens=True)
    assert set(words(story)) <= grammar


def test_a_story_keeps_the_name_of_its_prompt(model: Any, tokenizer: Any) -> None:
    prompt = "Once upon a time, there was a curious owl named Björn. He lived in a warm cave on the mountain."
    story = tokenizer.decode(complete(model, tokenizer.encode(prompt)), skip_special_tokens=True)
    assert story.count("Björn") >= 2


def test_chat_template_renders(tokenizer: Any) -> None:
    messages = [
        {"role": "user", "content": " Hello! "},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Tell me a story."},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == ("<|bos|><|user|>Hello!<|assistant|>Hello!<|eos|><|user|>Tell me a story.<|assistant|>")


def test_the_chat_template_refuses_other_roles(tokenizer: Any) -> None:
    with pytest.raises(Exception, match="the roles are user and assistant"):
        tokenizer.apply_chat_template([{"role": "system", "content": "Be short."}], tokenize=False)


@pytest.mark.parametrize(("animal", "thing"), [("fox", "lantern"), ("bear", "kite"), ("mouse", "drum")])
def test_a_chat_is_answered_with_a_story_about_the_requested_thing(
    model: Any, tokenizer: Any, grammar: set[str], animal: str, thing: str
) -> None:
    messages = [{"role": "user", "content": f"Tell me a story about a {animal} and a {thing}."}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = complete(model, tokenizer.encode(prompt, add_special_tokens=False))
    assert ids[-1] == tokenizer.eos_token_id
    told = words(tokenizer.decode(ids, skip_special_tokens=True))
    assert thing in told
    assert set(told) <= grammar
