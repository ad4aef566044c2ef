"""Which model is meant."""

from pathlib import Path


class ModelNotFound(Exception):
    """There is no such model directory."""


def embedded_model() -> str:
    """The directory of the checkpoint that comes with the repository. Raises ModelNotFound outside of one."""
    directory = Path(__file__).resolve().parent.parent / "models" / "tiny"
    if not (directory / "config.json").is_file():
        raise ModelNotFound(
            "the embedded checkpoint models/tiny is not part of this installation: "
            "name a model with --model (a directory, or a hub id such as organisation/name)"
        )
    return str(directory)


def resolved_model(model: str | None) -> str:
    """A directory as an absolute path, a hub id as it is, the embedded model for None.

    Raises ModelNotFound for what can be neither. That a hub id exists only the services can tell.
    """
    if model is None:
        return embedded_model()
    directory = Path(model).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise ModelNotFound(f"the model directory {model} has no config.json")
        return str(directory.resolve())
    if directory.exists():
        raise ModelNotFound(f"the model {model} is a file: name the directory that holds config.json")
    is_hub_id = len(directory.parts) == 2 and not directory.is_absolute() and not model.startswith((".", "~"))
    if not is_hub_id:
        raise ModelNotFound(f"unknown model directory: {model}")
    return model
