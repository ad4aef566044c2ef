"""The small files of a checkpoint that the scheduler reads. The weights are the executor's business."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.model_path import ModelNotFound, local_directory
from scheduler.core.errors import QuireError

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
    "config.json",
)
"""All that is ever downloaded by the scheduler."""


class CheckpointError(QuireError):
    """A checkpoint that is not there, not complete or not readable. The message names the file."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A directory that exists."""

    directory: Path

    @classmethod
    def find(cls, model: str, revision: str | None = None) -> "Checkpoint":
        """Raises CheckpointError if `model` is neither a directory nor a hub id that can be fetched.

        revision: of a hub id; None: its default branch. A directory has none.
        """
        try:
            directory = local_directory(model)
        except ModelNotFound as error:
            raise CheckpointError(str(error)) from None
        return cls(directory or _fetch(model, revision))

    def text(self, name: str) -> str | None:
        """The file's text; None where there is no such file. Raises CheckpointError if it is unreadable."""
        path = self.directory / name
        try:
            return path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error

    def json_object(self, name: str) -> dict[str, Any]:
        """The file's JSON object; an empty one where there is no such file. Raises CheckpointError."""
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
    # The scheduler installs without huggingface_hub: a scheduler host often has the checkpoint on disk.
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f"{repository!r} is no directory here, and fetching it from the hub needs the package huggingface_hub"
        ) from error
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(FILES)))
    except Exception as error:  # the client's own errors, those of its HTTP library, OSError: one meaning for us
        raise CheckpointError(f"{repository!r} cannot be fetched from the hub: {error}") from error
