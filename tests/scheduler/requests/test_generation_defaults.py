"""Defaults from a checkpoint's generation_config.json."""

import json
from pathlib import Path
from typing import Any

import pytest

from scheduler.requests.generation_defaults import GenerationDefaults
from scheduler.text.checkpoint import Checkpoint, CheckpointError


def load(
    directory: Path, config: dict[str, Any] | str | None, model_config: dict[str, Any] | None = None
) -> GenerationDefaults:
    if config is not None:
        (directory / "generation_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if model_config is not None:
        (directory / "config.json").write_text(json.dumps(model_config))
    return GenerationDefaults.load(Checkpoint(directory), tokenizer_eos_token_id=9)


def test_without_files_only_the_tokenizer_counts(tmp_path: Path) -> None:
    assert load(tmp_path, None) == GenerationDefaults({}, (9,))


def test_values_do_not_depend_on_do_sample(tmp_path: Path) -> None:
    sampling = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.05}
    config = sampling | {"do_sample": False, "eos_token_id": 3}
    assert load(tmp_path, config) == GenerationDefaults(sampling, (3, 9))


def test_null_counts_as_absent(tmp_path: Path) -> None:
    config = {"temperature": None, "top_p": None, "top_k": None, "eos_token_id": None}
    assert load(tmp_path, config, {"eos_token_id": [4, 5]}) == GenerationDefaults(eos_token_ids=(4, 5, 9))


def test_eos_ids_of_generation_config_take_precedence(tmp_path: Path) -> None:
    assert load(tmp_path, {"eos_token_id": [1, 2]}, {"eos_token_id": 4}).eos_token_ids == (1, 2, 9)


def test_the_eos_token_of_the_tokenizer_always_ends_a_text(tmp_path: Path) -> None:
    """A base model's id, which generation_config.json keeps, does not end the answers of a model trained on chats."""
    assert load(tmp_path, {"eos_token_id": 2}).eos_token_ids == (2, 9)
    assert load(tmp_path, {"eos_token_id": [9, 2]}).eos_token_ids == (9, 2)
    assert GenerationDefaults.load(Checkpoint(tmp_path)).eos_token_ids == (9, 2)


def test_values_that_only_files_have(tmp_path: Path) -> None:
    assert load(tmp_path, {"top_k": -1}).sampling["top_k"] == 0
    for top_p in (0, 1e-50):  # the executor receives a float32, in which both are 0
        assert 1e-7 < load(tmp_path, {"top_p": top_p}).sampling["top_p"] < 0.001


@pytest.mark.parametrize(
    "config",
    [
        {"temperature": -1},
        {"temperature": "hot"},
        {"temperature": True},
        {"top_p": 1.5},
        '{"min_p": NaN}',
        '{"temperature": Infinity}',
        {"top_k": -2},
        {"eos_token_id": -1},
        {"eos_token_id": "</s>"},
        {"eos_token_id": [1, None]},
        {"eos_token_id": 2**31},
        "not json",
        "[1]",
    ],
)
def test_bad_values_are_refused_with_the_name_of_the_file(tmp_path: Path, config: dict[str, Any] | str) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        load(tmp_path, config)
