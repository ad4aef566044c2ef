"""A row of weights that is not a number, under `quire serve`: it fails its own requests, and no others."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from quire import InternalError
from quire.checksums import MANIFEST
from tests.support.e2e.stack import TINY, Stack
from tests.support.e2e.streams import StreamGroup, differences, mixed_jobs, outcomes
from tests.support.e2e.waiting import until
from tests.support.paths import ROOT

JOBS = mixed_jobs(8)
BAD_TOKEN = 1663
"""Its row of the embedding is NaN. Prompts and outputs of the other requests do not contain it."""

UNCHECKED = f"""
import sys
if "executor" in sys.orig_argv:
    sys.path.insert(0, {str(ROOT)!r})
    import torch
    torch.isfinite = lambda tensor: torch.ones_like(tensor, dtype=torch.bool)
"""
"""Lets the executor load such weights, as if they had changed in its memory. Only the check at load uses torch."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the embedded model with its head apart from the embedding, of which one row is NaN."""
    directory = tmp_path_factory.mktemp("model") / "tiny"
    shutil.copytree(TINY, directory)
    (directory / MANIFEST).unlink()
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    weights = load_file(directory / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    weights["lm_head.weight"] = embedding.clone()
    embedding[BAD_TOKEN] = float("nan")
    save_file(weights, directory / "model.safetensors")
    return directory


@pytest.mark.exhaustive
async def test_a_row_that_is_not_a_number_fails_its_requests_only(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of its rows end the executor, which comes back: it might be the device that has gone wrong."""
    (tmp_path / "sitecustomize.py").write_text(UNCHECKED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Stack(model=str(model)) as stack:
        async with stack.client() as client:
            expected = await outcomes(client, JOBS)
            assert not any(BAD_TOKEN in output.token_ids for outcome in expected for output in outcome.outputs)
            executor = stack.pid("executor")
            streams = StreamGroup(client, JOBS).start()
            await streams.until(lambda streams: streams.all_have(5))
            for _ in range(3):
                assert stack.pid("executor") == executor
                with pytest.raises(InternalError, match="numbers that are not finite"):
                    await client.complete([5, BAD_TOKEN], max_tokens=4)
            await until(lambda: stack.pid("executor") not in (None, executor))
            assert differences(await streams.ended(), expected) == []
            assert differences(await outcomes(client, JOBS), expected) == []
        _, metrics = await stack.get("/metrics")
        assert 'reason="not_finite"} 3.0' in metrics
        assert stack.serve.return_code is None
