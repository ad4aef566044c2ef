"""Shapes without weights: the executor and transformers read the same model from one config.json."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from bench.gpu.random_models import SHAPES, make_tokenizer, write_model
from executor.checkpoints.model_config import read_model_config
from executor.models.weights import expected_shapes


@pytest.mark.parametrize("shape", SHAPES)
def test_executor_and_transformers_see_the_same_model(shape: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    write_model(shape, tmp_path)
    config = read_model_config(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    theirs = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del theirs["lm_head.weight"]
    assert theirs == expected_shapes(config)
    assert model.config.rms_norm_eps == config.rms_norm_eps
    assert model.config.rope_parameters["rope_theta"] == SHAPES[shape]["rope_theta"]


def test_shapes_have_the_parameters_of_their_names(tmp_path: Path) -> None:
    def num_parameters(shape: str) -> int:
        shapes = expected_shapes(read_model_config(write_model(shape, tmp_path / shape)))
        return sum(torch.Size(sizes).numel() for sizes in shapes.values())

    assert num_parameters("llama-3.1-8b") == 8_030_261_248
    assert num_parameters("qwen3-0.6b") == 596_049_920


@pytest.mark.parametrize("vocab_size", [259, 260, 1000, 12_000])
def test_tokenizer_has_a_text_for_every_id(vocab_size: int) -> None:
    tokenizer = make_tokenizer(vocab_size)
    assert tokenizer.get_vocab_size() == vocab_size
    assert [tokenizer.id_to_token(i) for i in range(vocab_size)].count(None) == 0
    text = "Für 5 €, please: a text."
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_tokenizer_can_be_read_back(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(write_model("llama-tiny", tmp_path) / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == SHAPES["llama-tiny"]["vocab_size"]
    assert tokenizer.token_to_id("<|eos|>") == SHAPES["llama-tiny"]["eos_token_id"]


@pytest.mark.parametrize("vocab_size", [258, 10**6])
def test_impossible_vocabulary_is_an_error(vocab_size: int) -> None:
    with pytest.raises(ValueError, match=f"no vocabulary of {vocab_size}"):
        make_tokenizer(vocab_size)
