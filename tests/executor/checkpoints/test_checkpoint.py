"""Missing, truncated, incomplete and inconsistent checkpoints are each rejected with a clear message."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file

from executor.checkpoints.checkpoint import Checkpoint, locate, weight_files
from executor.checkpoints.download import saying_progress
from executor.errors import CheckpointError
from tests.support.executor.checkpoints import make_checkpoint
from tests.support.executor.plan_driver import generate
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def directory(tmp_path) -> Path:
    return make_checkpoint("llama", tmp_path / "model").directory


def edit_tensors(directory: Path, change) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def complaint(make_runner, directory: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        make_runner(directory)
    return str(error.value)


@pytest.mark.parametrize("model", ["no-such-directory", "./nowhere", "/no/such/directory", "a/b/c", "../up"])
def test_an_unknown_directory_is_rejected(model, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="no such directory"):
        locate(model)


def test_a_file_in_place_of_a_directory_is_rejected(directory) -> None:
    with pytest.raises(CheckpointError, match="a file; expected the directory"):
        locate(str(directory / "config.json"))


IN_REPOSITORY = {
    "config.json": True,
    "chat_template.jinja": True,
    "additional_chat_templates/tool_use.jinja": True,
    "model-00001-of-00002.safetensors": True,
    "model.safetensors.index.json": True,
    "tokenizer.json": True,
    "consolidated.safetensors": False,  # the same weights once more
    "consolidated-00001-of-00002.safetensors": False,
    "checkpoint-500/model.safetensors": False,
    "pytorch_model.bin": False,
    "modeling.py": False,
}
"""Files as in repositories of the hub, and whether the executor needs them."""


def test_a_hub_id_is_downloaded(directory, monkeypatch) -> None:
    asked = []

    def snapshot_download(repo_id, revision, **patterns):
        asked.append((repo_id, revision, list(filter_repo_objects(IN_REPOSITORY, **patterns))))
        return str(directory)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert locate("someone/some-model", "v2") == directory
    assert asked == [("someone/some-model", "v2", [name for name, is_read in IN_REPOSITORY.items() if is_read])]


def test_the_progress_of_a_download_is_reported_while_files_grow(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    blobs = tmp_path / "models--someone--some-model" / "blobs"
    said: list[str] = []
    with saying_progress("someone/some-model", said.append, interval_s=0.001):
        blobs.mkdir(parents=True)
        for num_mib in (1, 2):
            (blobs / "part.incomplete").write_bytes(bytes(num_mib << 20))
            line = f"downloading someone/some-model: {num_mib} MiB so far"
            wait_until(lambda line=line: line in said)


def test_a_failed_download_is_reported(monkeypatch) -> None:
    def snapshot_download(*args, **options):
        raise LocalEntryNotFoundError("not in the cache, and no network\nsecond line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(CheckpointError) as error:
        locate("someone/some-model")
    assert "someone/some-model: no such directory, and not found on the hub" in str(error.value)
    assert "second line" not in str(error.value)


def test_a_missing_config_is_rejected(directory, make_runner) -> None:
    (directory / "config.json").unlink()
    assert complaint(make_runner, directory) == f"{directory}: no config.json"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight"]
)
def test_weights_that_are_not_finite_are_rejected(name, value, directory, make_runner) -> None:
    edit_tensors(directory, lambda tensors: tensors[name].view(-1)[3:5].fill_(value))
    assert f"{name}: 2 of " in (text := complaint(make_runner, directory))
    assert text.endswith("numbers are not finite in torch.float32")


def test_weights_that_overflow_in_the_dtype_are_rejected(directory, make_runner) -> None:
    edit_tensors(directory, lambda tensors: tensors["model.norm.weight"][:1].fill_(1e6))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: 1 of 64 numbers are not finite in torch\.float16"):
        make_runner(directory, dtype="float16")


@pytest.mark.parametrize("content", ["{", "[]", "null"])
def test_a_broken_config_is_rejected(content, directory, make_runner) -> None:
    (directory / "config.json").write_text(content)
    assert str(directory / "config.json") in complaint(make_runner, directory)


def test_missing_safetensors_are_rejected(directory, make_runner) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    assert complaint(make_runner, directory) == f"{directory}: no safetensors file"


@pytest.mark.parametrize("num_bytes", [0, 5, 1000, 100_000])
def test_a_truncated_file_is_rejected(num_bytes, directory, make_runner) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:num_bytes])
    assert complaint(make_runner, directory).startswith(f"{path}: broken safetensors file: ")


def test_a_file_of_another_format_is_rejected(directory, make_runner) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(b"\x80\x02}q\x00." * 50)
    assert "broken safetensors file" in complaint(make_runner, directory)


@pytest.mark.parametrize(
    ("dtype", "found"),
    [
        (torch.int8, "I8"),
        (torch.bool, "BOOL"),
        (torch.float8_e4m3fn, "F8_E4M3"),
        (torch.float64, "F64"),
        (torch.complex64, "C64"),
    ],
)
def test_tensors_that_hold_no_weights_are_named(dtype, found, directory, make_runner) -> None:
    """Their numbers mean something else: those of a quantized model have to be multiplied by scales."""
    name = "model.layers.1.mlp.up_proj.weight"
    edit_tensors(directory, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    assert f"{name}: expected dtype F32 or BF16 or F16, found {found}" in complaint(make_runner, directory)


def test_missing_tensors_are_named(directory, make_runner) -> None:
    def drop(tensors):
        for name in [name for name in tensors if "layers.1" in name]:
            del tensors[name]

    edit_tensors(directory, drop)
    message = complaint(make_runner, directory)
    assert "missing tensors: model.layers.1." in message
    assert message.endswith("and 4 more")


def test_a_wrong_shape_is_named(directory, make_runner) -> None:
    edit_config(directory, intermediate_size=96)
    expected = "model.layers.0.mlp.gate_proj.weight: expected shape (96, 64), found (112, 64)"
    assert expected in complaint(make_runner, directory)


def test_tensors_of_another_architecture_are_rejected(directory, make_runner) -> None:
    edit_tensors(directory, lambda tensors: tensors.update({"model.layers.0.self_attn.sinks": torch.zeros(4)}))
    assert "tensors that this architecture does not have: model.layers.0.self_attn.sinks" in complaint(
        make_runner, directory
    )


def test_tables_of_older_exporters_are_ignored(directory, make_runner) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(directory, lambda tensors: tensors.update({name: torch.zeros(8)}))
    assert generate(make_runner(directory), [[1, 2]], 1)


def test_a_tied_head_may_be_stored_too(tmp_path, make_runner) -> None:
    source = make_checkpoint("llama-tied", tmp_path)
    embedding = "model.embed_tokens.weight"
    edit_tensors(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors[embedding].clone()}))
    prompt = source.prompt(5)
    assert generate(make_runner(tmp_path), [prompt], 6) == [source.greedy(prompt, 6)]


@pytest.mark.parametrize("shape", [(301, 64), (300, 64), (301, 63)])
def test_a_tied_head_that_is_stored_with_other_numbers_is_rejected(tmp_path, make_runner, shape) -> None:
    """With transformers 5, such weights are not tied; with older versions, they were."""
    make_checkpoint("llama-tied", tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(shape)}))
    assert "set tie_word_embeddings to false" in complaint(make_runner, tmp_path)


def test_a_single_file_may_have_any_name(directory, make_runner) -> None:
    (directory / "model.safetensors").rename(directory / "weights.safetensors")
    assert make_runner(directory)


def test_several_files_without_an_index_are_rejected(directory, make_runner) -> None:
    path = directory / "model.safetensors"
    path.rename(directory / "a.safetensors")
    save_file({"x": torch.zeros(1)}, directory / "b.safetensors")
    assert "several safetensors files but no model.safetensors.index.json" in complaint(make_runner, directory)


@pytest.fixture
def sharded(tmp_path) -> Path:
    return make_checkpoint("llama", tmp_path / "sharded", max_shard_size="100KB").directory


def test_a_single_file_counts_beside_the_shards_of_another_save(sharded, directory, make_runner, tmp_path) -> None:
    """Transformers loads it, too, whichever was saved later."""
    for name in (*(path.name for path in sharded.glob("*.safetensors")), "model.safetensors.index.json"):
        (directory / name).write_bytes((sharded / name).read_bytes())
    before = weight_files(directory)
    assert [path.name for path in before] == ["model.safetensors"]
    for path in directory.glob("model-*.safetensors"):
        path.unlink()
    assert weight_files(directory) == before
    assert make_runner(directory)


def test_a_missing_shard_is_named(sharded, make_runner) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    assert complaint(make_runner, sharded) == f"{sharded}: missing shards: {shard.name}"


@pytest.mark.parametrize("index", ["{", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', "[]"])
def test_a_broken_index_is_rejected(index, sharded, make_runner) -> None:
    (sharded / "model.safetensors.index.json").write_text(index)
    assert "not an index of safetensors" in complaint(make_runner, sharded)


def test_an_index_with_unknown_tensors_is_rejected(sharded, make_runner) -> None:
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.extra"] = next(iter(index["weight_map"].values()))
    path.write_text(json.dumps(index))
    assert "no shard holds model.extra, which the index lists" in complaint(make_runner, sharded)


def test_an_unknown_dtype_is_rejected(directory, make_runner) -> None:
    edit_config(directory, dtype="float8_e4m3fn")
    assert "dtype 'float8_e4m3fn' is not supported" in complaint(make_runner, directory)


def test_the_dtype_defaults_to_that_of_the_tensors(directory, make_runner) -> None:
    edit_tensors(directory, lambda t: t.update({name: tensor.half() for name, tensor in t.items()}))
    edit_config(directory, dtype=None)
    assert make_runner(directory).model.pool.dtype == torch.float16


def test_tensors_are_views_of_the_file(directory) -> None:
    """Two reads of one tensor share the same memory-mapped bytes."""
    checkpoint = Checkpoint(directory)
    first, second = (checkpoint.tensor("model.norm.weight") for _ in range(2))
    assert first.data_ptr() == second.data_ptr()
