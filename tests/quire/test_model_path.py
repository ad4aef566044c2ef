"""Names of models mean the same to the command line and to both services."""

from pathlib import Path

import pytest

from executor.checkpoints.checkpoint import locate
from executor.errors import CheckpointError as ExecutorCheckpointError
from quire.model_path import ModelNotFound, local_directory, resolved_model
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


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="has no config"):
        resolved_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolved_model(".") == str(tmp_path.resolve())
