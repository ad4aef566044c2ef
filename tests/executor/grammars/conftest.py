"""A runner whose vocabulary has a few letters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from executor.grammars import slot_grammar
from tests.support.executor.letters import make_lettered

if TYPE_CHECKING:
    from executor.device.runner import ModelRunner
    from tests.support.executor.checkpoints import RandomCheckpoint


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets steps wait for masks however slow the machine is."""
    monkeypatch.setattr(slot_grammar, "MAX_WAIT_S", 60.0)


@pytest.fixture(scope="session")
def lettered(tmp_path_factory: pytest.TempPathFactory) -> RandomCheckpoint:
    return make_lettered(tmp_path_factory.mktemp("checkpoints") / "lettered")


@pytest.fixture(scope="session", params=["reference", "auto"])
def runner(request, lettered, make_runner) -> ModelRunner:
    return make_runner(lettered.directory, kernels=request.param, max_num_seqs=40, num_blocks=900)
