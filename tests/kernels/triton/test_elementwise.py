"""Norms, activation, greedy sampling and warm-up of `kernels.triton`."""

from __future__ import annotations

import pytest
import torch

from kernels import AttentionShape, reference
from kernels import triton as triton_kernels
from tests.support.triton.places import DEVICE, DTYPES, assert_rounded


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (3, 512), (40, 1000), (33, 7), (0, 64), (64,), (2, 3, 5, 16), (2, 5000)])
def test_norms_equal_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, residual = (torch.randn(2, *shape) * 3).to(dtype).to(DEVICE).unbind()
    weight = torch.randn(shape[-1]).to(dtype).to(DEVICE)
    result = triton_kernels.rms_norm(x, weight, 1e-5)
    assert_rounded(result, reference.rms_norm(x, weight, 1e-5), roundings=2)

    summed, x_before = x + residual, x.clone()
    expected = reference.rms_norm(summed, weight, 1e-5)
    assert_rounded(triton_kernels.add_rms_norm(x, residual, weight, 1e-5), expected, roundings=2)
    assert torch.equal(residual, summed)
    assert torch.equal(x, x_before)


def test_eps_keeps_small_rows_small() -> None:
    x, weight = torch.randn(3, 64, device=DEVICE) * 1e-3, torch.randn(64, device=DEVICE)
    assert_rounded(triton_kernels.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_heads_inside_a_fused_projection(dtype: torch.dtype) -> None:
    fused = torch.randn(9, 8, 32).to(dtype).to(DEVICE)
    before, weight = fused.clone(), torch.randn(32).to(dtype).to(DEVICE)
    heads = fused[:, 2:6]
    result = triton_kernels.rms_norm(heads, weight, 1e-6)
    assert result.is_contiguous()
    assert_rounded(result, reference.rms_norm(heads, weight, 1e-6), roundings=2)
    assert torch.equal(fused, before)

    residual = torch.randn(9, 10, 32).to(dtype).to(DEVICE)
    summed, outside = residual[:, 3:7] + heads, residual[:, :3].clone()
    triton_kernels.add_rms_norm(heads, residual[:, 3:7], weight, 1e-6)
    assert torch.equal(residual[:, 3:7], summed)
    assert torch.equal(residual[:, :3], outside)


def test_norm_of_strided_rows() -> None:
    x, weight = torch.randn(8, 100, device=DEVICE)[::2, :64], torch.randn(64, device=DEVICE)
    assert_rounded(triton_kernels.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))


def test_norms_refuse_unsupported_layouts() -> None:
    x = torch.randn(8, 8, device=DEVICE)
    with pytest.raises(ValueError, match="contiguous"):
        triton_kernels.rms_norm(x.t(), x[0], 1e-5)
    with pytest.raises(ValueError, match="shape"):
        triton_kernels.add_rms_norm(x.view(2, 4, 8), x, x[0], 1e-5)
    with pytest.raises(ValueError, match="contiguous"):
        triton_kernels.rms_norm(torch.randn(2, 3, 4, 16, device=DEVICE)[..., :8], x[0], 1e-5)


@pytest.mark.parametrize("row", [0, 41, 69])
def test_a_norm_does_not_depend_on_other_rows(row: int) -> None:
    x, weight = torch.randn(70, 100, device=DEVICE), torch.randn(100, device=DEVICE)
    assert torch.equal(
        triton_kernels.rms_norm(x, weight, 1e-5)[row], triton_kernels.rms_norm(x[row : row + 1], weight, 1e-5)[0]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 16), (5, 1408), (64, 333), (0, 16)])
def test_activation_equals_the_reference(num_rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = (torch.randn(num_rows, 2 * width) * 6).to(dtype).to(DEVICE)
    assert_rounded(triton_kernels.silu_multiply(gate_up), reference.silu_multiply(gate_up), roundings=2)


def test_activation_at_the_ends_of_the_range() -> None:
    gate = torch.tensor([-1e30, -200.0, -88.0, -0.0, 0.0, 88.0, 200.0, 1e30, torch.nan])
    result = triton_kernels.silu_multiply(torch.cat((gate, torch.ones(9)))[None].to(DEVICE))[0]
    expected = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 88.0, 200.0, 1e30, torch.nan])
    torch.testing.assert_close(result.cpu(), expected, rtol=1e-5, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("token_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("vocab_size", [5, 8191, 8192, 20000])
def test_greedy_sampling_takes_the_lowest_id(vocab_size: int, token_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """Equal logits may be near or far apart; NaN is never chosen; a row without numbers gets id 0."""
    logits = torch.randn(7, vocab_size + 3).to(dtype)[:, :vocab_size]
    logits[0, [1, 2, vocab_size - 1]] = 50.0
    logits[1, vocab_size - 1] = 50.0
    logits[2] = -torch.inf
    logits[3, 0] = torch.nan
    logits[3, 3] = 50.0
    logits[4] = torch.nan
    logits[5] = -torch.inf
    logits[5, 4] = -60000.0
    expected = [1, vocab_size - 1, 0, 3, 0, 4]
    last = logits[6].float()
    expected.append(int((last == last.max()).nonzero()[0]))
    token_ids = torch.full((8,), -7, dtype=token_dtype, device=DEVICE)
    triton_kernels.choose_greedily(logits.to(DEVICE), token_ids[:7])
    assert token_ids.tolist() == [*expected, -7]


def test_warm_up_launches_every_kernel_and_reports_its_progress() -> None:
    told: list[tuple[str, int, int]] = []
    triton_kernels.warm_up(
        AttentionShape(torch.float16, 6, 2, 80, 16),
        lambda name, done, total: told.append((name, done, total)),
        hidden_size=96,
        vocab_size=500,
        max_num_seqs=8,
        device=DEVICE,
    )
    assert [done for _, done, _ in told] == list(range(len(told)))
    assert {total for _, _, total in told} == {len(told)}
    assert "greedy sampling" in [name for name, _, _ in told]
