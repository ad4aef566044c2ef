"""Ranking of logits, compared with numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.cpu import rank

SIZES = (1, 2, 16, 255, 256, 257, 3000)


def logits_of(kind: str, num_rows: int, size: int) -> torch.Tensor:
    logits = torch.randn(num_rows, size) * 3
    if kind == "ties":
        return logits.div(3).round()
    if kind == "zeros":
        return torch.where(logits > 0, 0.0, -0.0)
    if kind == "holes":
        return logits.masked_fill(logits < 1, -torch.inf).index_fill(1, torch.tensor([size - 1]), -2.0)
    if kind == "rising":  # every logit is the largest so far
        return logits.sort(dim=-1).values
    return logits


@pytest.mark.parametrize("kind", ["random", "ties", "zeros", "holes", "rising"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ids_sums_and_ranks_equal_numpy(kind: str, size: int, dtype: torch.dtype) -> None:
    logits = logits_of(kind, 6, size).to(dtype)
    exact = logits.double().numpy()
    order = np.argsort(-exact, axis=-1, kind="stable")
    token_ids = np.resize(np.array([0, size - 1, size // 2], np.int32), 6)
    for count in sorted({0, 1, min(2, size), min(6, size), size // 2, size}):
        ids, log_sums, ranks = rank(logits, token_ids, count)
        assert ids.tolist() == order[:, :count].tolist()
        assert log_sums == pytest.approx(np.log(np.exp(exact).sum(axis=-1)), abs=2e-6)
        assert [int(order[row, place - 1]) for row, place in enumerate(ranks)] == token_ids.tolist()
    assert not rank(logits, None, 1)[2].any()


def test_a_team_gives_the_same_result_for_strided_rows(two_threads: None) -> None:
    wide = torch.randn(40, 5000)
    logits = wide[:, 7:4007]
    token_ids = np.arange(40, dtype=np.int32)
    ids, log_sums, ranks = rank(logits, token_ids, 30)
    for row in range(40):
        alone = rank(logits[row : row + 1].contiguous(), token_ids[row : row + 1], 30)
        assert [part.tolist() for part in alone] == [[ids[row].tolist()], [log_sums[row]], [ranks[row]]]


def test_nan_still_gives_tokens() -> None:
    logits = torch.full((3, 700), torch.nan)
    logits[1] = -torch.inf
    logits[2, ::3] = torch.inf
    ids, _, ranks = rank(logits, np.zeros(3, np.int32), 9)
    assert ((ids >= 0) & (ids < 700)).all()
    assert ((ranks >= 1) & (ranks <= 700)).all()


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="5 of 4"):
        rank(torch.zeros(3, 4), None, 5)
    with pytest.raises(ValueError, match="contiguous"):
        rank(torch.zeros(4, 3).T, None, 1)
    with pytest.raises(ValueError, match="2 tokens of 3"):
        rank(torch.zeros(3, 4), np.zeros(2, np.int32), 1)
    assert rank(torch.zeros(0, 4), None, 2)[0].shape == (0, 2)
