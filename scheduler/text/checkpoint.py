"""Reads the small files of a checkpoint. Only the executor reads the weights."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.checksums import TEXT_FILES, ChecksumError, verify
from quire.model_path import ModelNotFound, local_directory
from scheduler.core.errors import QuireError


class CheckpointError(QuireError):
    """Raised for a checkpoint that is missing, incomplete or unreadable. The message names the file."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The existing directory of a checkpoint."""

    directory: Path

    @classmethod
    def find(cls, model: str, revision: str | None = None) -> "Checkpoint":
        """Returns the checkpoint in a directory, or fetches one from the hub.

        `revision` applies to hub ids only; None is the default branch. Raises CheckpointError if `model` is neither a
        directory nor a hub id that can be fetched, and if a file differs from its known digest.
        """
        try:
            directory = local_directory(model) or _fetch(model, revision)
            verify(directory, TEXT_FILES)
        except (ModelNotFound, ChecksumError) as error:
            raise CheckpointError(str(error)) from None
        return cls(directory)

    def text(self, name: str) -> str | None:
        """Returns the file's text, or None if there is no such file. Raises CheckpointError if it is unreadable."""
        path = self.directory / name
        try:
            return path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error

    def json_object(self, name: str) -> dict[str, Any]:
        """Returns the file's JSON object, empty if there is no such file. Raises CheckpointError if it is malformed."""
        text = self.text(name)
        if text is None:
            return {}
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.directory / name} is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.directory / name} does not hold a JSON object")
        return value


def _fetch(repository: str, revision: str | None) -> Path:
    # huggingface_hub is optional, because a scheduler host often has the checkpoint on disk.
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f"{repository!r} is not a directory, and fetching it from the hub needs the package huggingface_hub"
        ) from error
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(TEXT_FILES)))
    except Exception as error:  # errors of the client, of its HTTP library, and OSError
        raise CheckpointError(f"{repository!r} cannot be fetched from the hub: {error}") from error
