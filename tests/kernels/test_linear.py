"""Linear layers of every home that runs on the CPU."""

from __future__ import annotations

import pytest
import torch

from kernels import cpu, reference
from kernels.cpu.panels import MAX_ROWS, PANEL

HOMES = {"cpu": cpu, "reference": reference}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def exact(x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor] | None) -> torch.Tensor:
    """In float64, rounded once."""
    y = torch.cat([x.double() @ weight.double().T for weight in weights], dim=1)
    return (y + torch.cat(biases).double() if biases else y).to(x.dtype)


@pytest.mark.parametrize("home", HOMES.values(), ids=HOMES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 5, MAX_ROWS, MAX_ROWS + 1, 50, 100])
@pytest.mark.parametrize("out_sizes", [(3,), (PANEL,), (PANEL + 1, 5), (2 * PANEL, PANEL // 2, PANEL // 2), (33, 200)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_products(home, dtype, num_rows, out_sizes, has_bias) -> None:
    weights = [torch.randn(size, 48).to(dtype) for size in out_sizes]
    biases = [torch.randn(size).to(dtype) for size in out_sizes] if has_bias else None
    x = torch.randn(num_rows, 48).to(dtype)
    layer = home.pack_linear(weights, biases)
    expected = exact(x, weights, biases)
    torch.testing.assert_close(layer(x), expected, atol=TOLERANCE[dtype] * 7, rtol=TOLERANCE[dtype])


def test_memory_is_what_the_weights_take() -> None:
    weight, bias = torch.randn(2 * PANEL, 48), torch.randn(2 * PANEL)
    for home in HOMES.values():
        assert home.pack_linear([weight], [bias]).num_bytes == weight.nbytes + bias.nbytes


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_row_is_the_same_in_any_batch(dtype) -> None:
    layer = cpu.pack_linear([torch.randn(100, 333).to(dtype)])
    x = torch.randn(97, 333).to(dtype)
    whole = layer(x)
    for first, count in [(0, 1), (5, 2), (17, 5), (3, 6), (40, 7), (1, 95)]:
        assert torch.equal(layer(x[first : first + count]), whole[first : first + count])


def test_two_threads_make_the_same_bits(two_threads: None) -> None:
    layer = cpu.pack_linear([torch.randn(700, 64)])
    x = torch.randn(150, 64)
    both = layer(x)
    torch.set_num_threads(1)
    assert torch.equal(layer(x), both)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_weights_that_fit_in_16_bits_are_kept_in_16_bits_exactly(narrow) -> None:
    weight = torch.randn(2 * PANEL, 48).to(narrow).float()
    weight[0, 0] += 2.0**-20 * weight[0, 0]
    wide = cpu.pack_linear([weight])
    weight[0, 0] = weight[0, 0].to(narrow).float()
    layer = cpu.pack_linear([weight])
    assert wide.num_bytes == 2 * layer.num_bytes
    x = torch.randn(9, 48)
    assert torch.equal(layer(x)[:, 1:], wide(x)[:, 1:])


def test_rows_may_lie_apart() -> None:
    layer = cpu.pack_linear([torch.randn(10, 16)])
    x = torch.randn(8, 40)
    assert torch.equal(layer(x[:, 4:20]), layer(x[:, 4:20].contiguous()))


def test_what_does_not_fit_is_refused() -> None:
    layer = cpu.pack_linear([torch.randn(10, 16)])
    with pytest.raises(ValueError, match="16 contiguous columns"):
        layer(torch.randn(3, 17))
    with pytest.raises(ValueError, match="16 contiguous columns"):
        layer(torch.randn(16, 3).T)
    with pytest.raises(TypeError, match="float64"):
        cpu.pack_linear([torch.randn(10, 16).double()])
