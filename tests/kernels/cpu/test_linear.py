"""Linear layers of every implementation that runs on the CPU."""

from __future__ import annotations

import pytest
import torch

from kernels import cpu, reference
from kernels.cpu import panels
from kernels.cpu.linear import SPAN_INPUTS
from kernels.cpu.panels import MAX_ROWS, PANEL

IMPLEMENTATIONS = {"cpu": cpu, "reference": reference}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def exact(x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor] | None) -> torch.Tensor:
    """Returns the result computed in float64 and rounded once."""
    y = torch.cat([x.double() @ weight.double().T for weight in weights], dim=1)
    return (y + torch.cat(biases).double() if biases else y).to(x.dtype)


@pytest.mark.parametrize("kernels", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 5, MAX_ROWS, MAX_ROWS + 1, 50, 100])
@pytest.mark.parametrize("out_sizes", [(3,), (PANEL,), (PANEL + 1, 5), (2 * PANEL, PANEL // 2, PANEL // 2), (33, 200)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_products_equal_the_exact_result(kernels, dtype, num_rows, out_sizes, has_bias) -> None:
    weights = [torch.randn(size, 48).to(dtype) for size in out_sizes]
    biases = [torch.randn(size).to(dtype) for size in out_sizes] if has_bias else None
    x = torch.randn(num_rows, 48).to(dtype)
    layer = kernels.pack_linear(weights, biases)
    expected = exact(x, weights, biases)
    torch.testing.assert_close(layer(x), expected, atol=TOLERANCE[dtype] * 7, rtol=TOLERANCE[dtype])


def test_num_bytes_is_the_size_of_the_weights() -> None:
    weight, bias = torch.randn(2 * PANEL, 48), torch.randn(2 * PANEL)
    for kernels in IMPLEMENTATIONS.values():
        assert kernels.pack_linear([weight], [bias]).num_bytes == weight.nbytes + bias.nbytes


@pytest.fixture
def no_bfloat16_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a processor without bfloat16 multiplication."""
    monkeypatch.setattr(panels, "HAS_BFLOAT16_DOTS", False)
    monkeypatch.setattr(panels, "HAS_AMX", False)


@pytest.mark.parametrize("num_rows", [1, MAX_ROWS, 50])
@pytest.mark.parametrize("in_size", [2, 48, 49, 64, 334])
def test_bfloat16_is_widened_on_processors_without_its_multiplication(no_bfloat16_dots, num_rows, in_size) -> None:
    weight, x = torch.randn(PANEL + 5, in_size).bfloat16(), torch.randn(num_rows, in_size).bfloat16()
    torch.testing.assert_close(cpu.pack_linear([weight])(x), exact(x, [weight], None), atol=0.07, rtol=1e-2)


@pytest.mark.parametrize(
    "in_size", [1, 2, 32, 47, 333, SPAN_INPUTS, SPAN_INPUTS + 1, 2 * SPAN_INPUTS + 64, 2 * SPAN_INPUTS + 66]
)
def test_bfloat16_of_any_number_of_inputs(in_size) -> None:
    """An odd number of inputs cannot be stored in pairs."""
    weight, x = torch.randn(PANEL + 5, in_size).bfloat16(), torch.randn(13, in_size).bfloat16()
    expected = x.double() @ weight.double().T
    error = (cpu.pack_linear([weight])(x).double() - expected).abs()
    assert bool((error <= 2**-8 * expected.abs() + 1e-5 * in_size).all()), "the error exceeds one rounding of the sum"


def test_nan_and_infinities_propagate() -> None:
    x = torch.ones(3, 48).bfloat16()
    x[1, 7] = torch.nan
    y = cpu.pack_linear([torch.ones(4, 48).bfloat16()])(x)
    assert torch.equal(y.isnan().all(dim=1), torch.tensor([False, True, False]))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("in_size", [96, 333, 334, 2 * SPAN_INPUTS + 64, 2 * SPAN_INPUTS + 66])
def test_a_row_is_the_same_in_any_batch(dtype, in_size) -> None:
    layer = cpu.pack_linear([torch.randn(100, in_size).to(dtype)])
    x = torch.randn(97, in_size).to(dtype)
    whole = layer(x)
    for first, count in [(0, 1), (5, 2), (17, 5), (3, 6), (40, 7), (1, 95)]:
        assert torch.equal(layer(x[first : first + count]), whole[first : first + count])


def test_two_threads_give_the_same_bits(two_threads: None) -> None:
    layer = cpu.pack_linear([torch.randn(700, 64)])
    x = torch.randn(150, 64)
    both = layer(x)
    torch.set_num_threads(1)
    assert torch.equal(layer(x), both)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_weights_that_fit_in_16_bits_are_kept_in_16_bits_exactly(narrow) -> None:
    weight = torch.randn(99, 48).to(narrow).float()
    weight[-1, -1] += 2.0**-20 * weight[-1, -1]
    wide = cpu.pack_linear([weight])
    weight[-1, -1] = weight[-1, -1].to(narrow).float()
    layer = cpu.pack_linear([weight])
    assert wide.num_bytes == 2 * layer.num_bytes
    x = torch.randn(9, 48)
    assert torch.equal(layer(x)[:, :-1], wide(x)[:, :-1])


def test_rows_may_have_a_stride() -> None:
    layer = cpu.pack_linear([torch.randn(10, 16)])
    x = torch.randn(8, 40)
    assert torch.equal(layer(x[:, 4:20]), layer(x[:, 4:20].contiguous()))


def test_inputs_of_another_shape_are_refused() -> None:
    layer = cpu.pack_linear([torch.randn(10, 16)])
    with pytest.raises(ValueError, match="16 contiguous columns"):
        layer(torch.randn(3, 17))
    with pytest.raises(ValueError, match="16 contiguous columns"):
        layer(torch.randn(16, 3).T)
    with pytest.raises(TypeError, match="float64"):
        cpu.pack_linear([torch.randn(10, 16).double()])
