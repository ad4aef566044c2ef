"""A checkpoint on disk: its safetensors files, and memory-mapped tensors from them.

Only safetensors are read: no pickle files, and no code that comes with a model.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from executor.checkpoints.download import saying_progress
from executor.checkpoints.shares import Span
from executor.errors import CheckpointError
from quire.model_path import ModelNotFound, local_directory

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_DTYPES = ("F32", "BF16", "F16")
_WANTED = ("*.json", "*.safetensors", "tokenizer*", "*.jinja")
# Repositories of Mistral have all weights twice, the second time with names of their own. Folders have other weights.
_UNREAD = ("consolidated*.safetensors", "*/*.safetensors")


def locate(model: str, revision: str | None = None, say: Callable[[str], None] = lambda line: None) -> Path:
    """Returns the directory of a model: `model` itself, or the local snapshot of a hub id, downloaded if necessary.

    say  called with lines about the progress of the download
    """
    try:
        directory = local_directory(model)
    except ModelNotFound as error:
        raise CheckpointError(str(error)) from None
    return directory or _download(model, revision, say)


def _download(model: str, revision: str | None, say: Callable[[str], None]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        with saying_progress(model, say):
            wanted, unread = list(_WANTED), list(_UNREAD)
            return Path(snapshot_download(model, revision=revision, allow_patterns=wanted, ignore_patterns=unread))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{model}: no such directory, and not found on the hub: {reason}") from None


class TensorSource(Protocol):
    """A source of a model's weights. See `Checkpoint`."""

    @property
    def names(self) -> frozenset[str]: ...
    def tensor(self, name: str) -> Tensor: ...
    def part(self, name: str, rows: Span | None, columns: Span | None) -> Tensor: ...
    def check_shapes(self, expected: Mapping[str, tuple[int, ...]], ignored: re.Pattern[str]) -> None: ...


class _OpenFile(Protocol):
    def keys(self) -> list[str]: ...
    def get_slice(self, name: str) -> Any: ...
    def get_tensor(self, name: str) -> Tensor: ...


class Checkpoint:
    """All tensors of a model by name. The files stay open and mapped as long as this exists; pages are read on use."""

    def __init__(self, directory: Path) -> None:
        """Raises CheckpointError for missing or broken files, and for an index that lists unknown tensors."""
        self.directory = directory
        self._file_of: dict[str, _OpenFile] = {}
        index = _read_index(directory)
        for path in _files(directory, index):
            opened = _open(path)
            self._file_of.update((name, opened) for name in opened.keys())  # noqa: SIM118  # not a dict
        if index and (absent := sorted(set(index) - set(self._file_of))):
            raise CheckpointError(f"{directory}: no shard holds {_some(absent)}, which the index lists")

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        """Returns a read-only view of the mapped file, in the dtype of the file."""
        return self._file_of[name].get_tensor(name)

    def part(self, name: str, rows: Span | None, columns: Span | None) -> Tensor:
        """Returns these rows or these columns of a tensor, in the dtype of the file. Copies nothing else of it."""
        return of_part(self._file_of[name].get_slice(name), rows, columns)

    def check_shapes(self, expected: Mapping[str, tuple[int, ...]], ignored: re.Pattern[str]) -> None:
        """Raises CheckpointError unless the checkpoint holds exactly these tensors, apart from `ignored` ones.

        Other numbers than floats of 16 and 32 bits are quantized weights, or none: they would load as wrong weights.
        """
        if missing := [name for name in expected if name not in self._file_of]:
            raise CheckpointError(f"{self.directory}: missing tensors: {_some(missing)}")
        if unknown := sorted(name for name in self.names - expected.keys() if not ignored.search(name)):
            raise CheckpointError(f"{self.directory}: tensors that this architecture does not have: {_some(unknown)}")
        for name, shape in expected.items():
            if (found := self.shape(name)) != shape:
                raise CheckpointError(f"{self.directory}: {name}: expected shape {shape}, found {found}")
            if (dtype := self._file_of[name].get_slice(name).get_dtype()) not in _DTYPES:
                raise CheckpointError(f"{self.directory}: {name}: expected dtype {' or '.join(_DTYPES)}, found {dtype}")


def of_part(stored: Any, rows: Span | None, columns: Span | None) -> Tensor:
    """Returns rows or columns of a tensor, or of a slice of a file that reads what is asked of it."""
    if columns is None:
        part: Tensor = stored[:] if rows is None else stored[rows.start : rows.stop]
    else:
        part = stored[:, columns.start : columns.stop]
    return part


def weight_files(directory: Path) -> list[Path]:
    """Returns the safetensors files of a checkpoint, in the order of their names. Raises CheckpointError."""
    return _files(directory, _read_index(directory))


def _read_index(directory: Path) -> dict[str, str] | None:
    """Returns the file name of each tensor of a sharded checkpoint; None if it is not sharded.

    A checkpoint that was saved twice may have a single file and an index. The file counts, as for transformers.
    """
    path = directory / _INDEX_FILE
    if not path.is_file() or (directory / _SINGLE_FILE).is_file():
        return None
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if not all(isinstance(file, str) for file in weight_map.values()):
            raise TypeError("weight_map: expected file names")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: not an index of safetensors: {error!r}") from None
    return dict(weight_map)


def _files(directory: Path, index: dict[str, str] | None) -> list[Path]:
    if index is not None:
        paths = [directory / name for name in sorted(set(index.values()))]
        if missing := [path.name for path in paths if not path.is_file()]:
            raise CheckpointError(f"{directory}: missing shards: {_some(missing)}")
        return paths
    if (single := directory / _SINGLE_FILE).is_file():
        return [single]
    paths = sorted(directory.glob("*.safetensors"))
    if len(paths) == 1:
        return paths
    if paths:
        raise CheckpointError(f"{directory}: several safetensors files but no {_INDEX_FILE}")
    raise CheckpointError(f"{directory}: no safetensors file")


def _open(path: Path) -> _OpenFile:
    try:
        opened: _OpenFile = safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: broken safetensors file: {error}") from None
    return opened


def _some(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def torch_dtype(name: str) -> torch.dtype:
    """Returns the dtype of this name. Raises CheckpointError for a dtype that the executor does not compute in."""
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in dtypes:
        raise CheckpointError(f"dtype {name!r} is not supported; known: {', '.join(dtypes)} (set dtype)")
    return dtypes[name]
