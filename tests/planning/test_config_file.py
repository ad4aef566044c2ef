"""An invalid config.json gives one line with the reason, and exit code 2."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import quire.cli.main
from planning.config_file import read_model_shape
from planning.errors import PlanningError
from tests.support.planning.configs import LLAMA_3_1_8B, QWEN_3_0_6B

EMBEDDED = Path(quire.cli.__file__).resolve().parents[2] / "models" / "tiny"


def written(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ([], "expected a JSON object"),
        ({}, "names no architecture"),
        ({"model_type": "mamba"}, "architecture 'mamba' is not supported"),
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture 'GPT2LMHeadModel' is not supported; supported: Llama"),
        ({"architectures": [7]}, "architecture 7 is not supported"),
        (LLAMA_3_1_8B | {"hidden_size": None}, "hidden_size: missing"),
        ({key: value for key, value in LLAMA_3_1_8B.items() if key != "vocab_size"}, "vocab_size: missing"),
        (LLAMA_3_1_8B | {"num_hidden_layers": 0}, "num_hidden_layers: expected a positive whole number, not 0"),
        (LLAMA_3_1_8B | {"num_hidden_layers": -3}, "not -3"),
        (LLAMA_3_1_8B | {"num_hidden_layers": 2.5}, "not 2.5"),
        (LLAMA_3_1_8B | {"num_hidden_layers": True}, "not True"),
        (LLAMA_3_1_8B | {"num_hidden_layers": "32"}, "not '32'"),
        (LLAMA_3_1_8B | {"vocab_size": 10**15}, "vocab_size: expected"),
        (LLAMA_3_1_8B | {"num_key_value_heads": 5}, "32 heads cannot share 5"),
        (LLAMA_3_1_8B | {"num_attention_heads": 24}, "24 heads do not divide a hidden_size of 4096"),
        (LLAMA_3_1_8B | {"tie_word_embeddings": "no"}, "tie_word_embeddings: expected true or false"),
        (LLAMA_3_1_8B | {"torch_dtype": 16}, "dtype: expected a name"),
        (LLAMA_3_1_8B | {"num_local_experts": 8}, "num_local_experts: 8 is not supported"),
        (LLAMA_3_1_8B | {"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_invalid_configs_give_one_line_and_exit_code_2(tmp_path: Path, content: Any, problem: str) -> None:
    path = written(tmp_path / "config.json", content)
    with pytest.raises(PlanningError) as caught:
        read_model_shape(tmp_path)
    assert str(path) in str(caught.value)
    assert problem in str(caught.value)
    result = CliRunner().invoke(quire.cli.main.app, ["plan", str(path)])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert problem in result.stderr
    assert result.stdout == ""


def test_missing_models_are_reported(tmp_path: Path) -> None:
    with pytest.raises(PlanningError, match=r"no config\.json"):
        read_model_shape(tmp_path)
    for model in (str(tmp_path), str(tmp_path / "nothing"), "llama-9-1t"):
        result = CliRunner().invoke(quire.cli.main.app, ["plan", model])
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--dtype", "int3"], "dtype"),
        (["--device", "abacus"], "device: 'abacus' is not known"),
        (["--device-memory", "much"], "80GB"),
        (["--device-memory", "10GB"], "but only 9.0 GB for weights and KV"),
        (["--tensor-parallel", "99"], "99 devices cannot share"),
        (["--block-size", "0"], "block_size: must be at least 1"),
        (["--block-size", "1000000"], "needs at least two blocks of 131.072 GB"),
        (["--num-blocks", "1"], "num_blocks: must be at least 2"),
        (["--gpu-memory-utilization", "1.5"], "gpu_memory_utilization"),
    ],
)
def test_invalid_settings_are_refused(flags: list[str], problem: str) -> None:
    result = CliRunner().invoke(quire.cli.main.app, ["plan", "llama-3.1-8b", *flags])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert problem in result.stderr


def test_a_model_is_a_directory_a_file_or_a_name(tmp_path: Path) -> None:
    embedded = read_model_shape(EMBEDDED)
    assert embedded == read_model_shape(EMBEDDED / "config.json")
    assert (embedded.name, embedded.num_layers, embedded.head_dim, embedded.tie_word_embeddings) == (
        "tiny",
        6,
        32,
        True,
    )
    assert read_model_shape(written(tmp_path / "mine.json", QWEN_3_0_6B)).name == "mine"
    result = CliRunner().invoke(quire.cli.main.app, ["plan", "Qwen3-0.6B", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["model"]["num_parameters"] == 596_049_920


def test_absent_fields_have_the_defaults_of_the_architecture() -> None:
    """Without head_dim in config.json, Qwen3 has heads of 128, and Llama divides the hidden size."""
    from planning.config_file import parse_model_shape

    silent = {key: value for key, value in QWEN_3_0_6B.items() if key != "head_dim"}
    assert parse_model_shape(silent, "").head_dim == 128
    llama = parse_model_shape(silent | {"architectures": ["LlamaForCausalLM"]}, "")
    assert (llama.head_dim, llama.qk_norm) == (64, False)
    by_type = {key: value for key, value in silent.items() if key != "architectures"} | {"model_type": "qwen3"}
    assert parse_model_shape(by_type, "").qk_norm


def test_the_embedded_checkpoint_has_the_computed_number_of_parameters() -> None:
    """The checkpoint file has a header and four bytes for each number."""
    with (EMBEDDED / "model.safetensors").open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        tensors = json.loads(file.read(length))
    num_stored = 0
    for name, tensor in tensors.items():
        if name != "__metadata__":
            size = 1
            for width in tensor["shape"]:
                size *= width
            num_stored += size
    assert read_model_shape(EMBEDDED).num_parameters == num_stored
