from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from executor.config import ExecutorConfig
from executor.loading import LoadedModel, load_model

if TYPE_CHECKING:
    from pathlib import Path

LoadGroup = Callable[..., LoadedModel]


@pytest.fixture
def load_group() -> Iterator[LoadGroup]:
    """Returns a function that loads a model on ranks in processes of their own, which end after the test."""
    loaded: list[LoadedModel] = []

    def load(
        directory: Path, size: int, *, say: Callable[[str], None] = lambda line: None, **settings: Any
    ) -> LoadedModel:
        defaults = {"kernels": "reference", "block_size": 4, "num_blocks": 200, "max_num_seqs": 8, "device": "cpu"}
        config = ExecutorConfig(
            model=str(directory), tensor_parallel_size=size, num_threads=1, **{**defaults, **settings}
        )
        loaded.append(load_model(config, say))
        return loaded[-1]

    yield load
    for model in loaded:
        model.close()
