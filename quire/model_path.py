"""Resolves the name of a model: a local directory, or a repository on the Hugging Face hub ("organisation/name").

The services and the command line use the same functions, so a name means the same to all of them.
"""

import re
from pathlib import Path

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


class ModelNotFound(Exception):
    """The name is neither a directory nor a hub id, or the directory holds no model."""


def local_directory(model: str) -> Path | None:
    """Returns the directory of that name, or None for a hub id. Raises ModelNotFound.

    A directory takes precedence over a hub id. Only the hub can tell whether a hub id exists.
    """
    try:
        directory = Path(model).expanduser()
        if directory.is_dir():
            return directory
        exists = directory.exists()
    except (OSError, RuntimeError, ValueError) as error:  # no permission, an unknown user, a name that is too long
        raise ModelNotFound(f"{model}: {error}") from None
    if exists:
        raise ModelNotFound(f"{model}: a file; expected the directory that holds config.json")
    if not _HUB_ID.fullmatch(model):
        raise ModelNotFound(f"{model}: no such directory, and no hub id (organisation/name)")
    return None


def embedded_model() -> str:
    """Returns the directory of the checkpoint that comes with Quire. Raises ModelNotFound if it was left out.

    A wheel has it inside this package, a checkout beside it.
    """
    package = Path(__file__).resolve().parent
    for parent in (package, package.parent):
        directory = parent / "models" / "tiny"
        if (directory / "model.safetensors").is_file():
            return str(directory)
    raise ModelNotFound(
        "the embedded checkpoint models/tiny is not part of this installation: "
        "name a model with --model (a directory, or a hub id such as organisation/name)"
    )


def resolved_model(model: str | None) -> str:
    """Returns a directory as an absolute path, a hub id unchanged, and the embedded model for None.

    Raises ModelNotFound.
    """
    if model is None:
        return embedded_model()
    directory = local_directory(model)
    if directory is None:
        return model
    if not (directory / "config.json").is_file():
        raise ModelNotFound(f"the model directory {model} has no config.json")
    return str(directory.resolve())
