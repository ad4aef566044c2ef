"""The weights of a model that runs do not depend on the files from which they were loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.executor.checkpoints import make_checkpoint
from tests.support.executor.plan_driver import generate


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("family", ["llama-tied", "llama-biases", "qwen3"])
def test_a_file_that_is_replaced_in_place_does_not_change_a_model_that_runs(
    family, kernels, tmp_path, make_runner
) -> None:
    """`cp` and `rsync --inplace` write into the file that is mapped. To be truncated, too, it must not be mapped."""
    checkpoint = make_checkpoint(family, tmp_path)
    path, prompt = tmp_path / "model.safetensors", checkpoint.prompt(7)
    runner = make_runner(tmp_path, kernels=kernels)
    before = generate(runner, [prompt], 8)
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert generate(runner, [prompt], 8) == before == [checkpoint.greedy(prompt, 8)]
    if (maps := Path("/proc/self/maps")).exists():
        assert str(path) not in maps.read_text()
