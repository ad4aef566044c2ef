"""The names of models mean the same in the command line and in both services."""

from pathlib import Path

import pytest

from executor.checkpoints.checkpoint import locate
from executor.errors import CheckpointError as ExecutorCheckpointError
from planning.errors import PlanningError
from planning.known_models import find_model
from quire import model_path
from quire.model_path import ModelNotFound, embedded_model, local_directory, resolved_model
from scheduler.text.checkpoint import Checkpoint
from scheduler.text.checkpoint import CheckpointError as SchedulerCheckpointError


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_directory_takes_precedence_over_a_hub_id(tmp_path: Path) -> None:
    assert local_directory("some/model") is None
    (tmp_path / "some" / "model").mkdir(parents=True)
    assert local_directory("some/model") == Path("some/model")


@pytest.mark.parametrize(
    "model",
    ["orgänisation/name", "organisation/näme", "a b/c", "-x/y", "x/-y", "organisation", "a/b/c", "../up", "x/.."],
)
def test_malformed_hub_ids_are_refused(model: str) -> None:
    with pytest.raises(ModelNotFound):
        resolved_model(model)
    with pytest.raises(SchedulerCheckpointError, match="no such directory"):
        Checkpoint.find(model)
    with pytest.raises(ExecutorCheckpointError, match="no such directory, and no hub id"):
        locate(model)


@pytest.mark.parametrize("model", ["~nosuchuser/x", "a" * 300, "a\0b"])
def test_names_that_the_system_cannot_look_up_are_refused(model: str) -> None:
    with pytest.raises(ModelNotFound):
        local_directory(model)
    with pytest.raises(PlanningError):
        find_model(model)


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="has no config"):
        resolved_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolved_model(".") == str(tmp_path.resolve())


@pytest.mark.parametrize("folder", ["site-packages/quire/models", "checkout/models"])
def test_the_embedded_model_is_inside_the_package_or_beside_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: str
) -> None:
    package = tmp_path / folder.split("/")[0] / "quire"
    monkeypatch.setattr(model_path, "__file__", str(package / "model_path.py"))
    with pytest.raises(ModelNotFound, match="not part of this installation"):
        embedded_model()
    checkpoint = tmp_path / folder / "tiny"
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.safetensors").touch()
    assert embedded_model() == str(checkpoint)
