"""Linear layers, packed or not."""

from __future__ import annotations

import pytest
import torch

from executor import linear
from executor.linear import Linear


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("num_rows", [1, 2, 7, 64, 100])
@pytest.mark.parametrize("has_bias", [True, False])
def test_linear(is_packed, num_rows, has_bias, monkeypatch) -> None:
    if not is_packed:
        monkeypatch.setattr(linear, "can_be_packed", lambda weight: False)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(size, 48, generator=generator) for size in (33, 5)]
    biases = [torch.randn(size, generator=generator) for size in (33, 5)] if has_bias else None
    x = torch.randn(num_rows, 48, generator=generator)
    layer = Linear.stacked(weights, biases)
    expected = torch.cat([x @ weight.T for weight in weights], dim=1)
    if biases:
        expected = expected + torch.cat(biases)
    with torch.inference_mode():
        torch.testing.assert_close(layer(x), expected, atol=1e-4, rtol=1e-4)
    assert layer.num_bytes == 38 * 48 * 4 + (38 * 4 if has_bias else 0)
    assert layer._is_packed == (is_packed and torch.backends.mkldnn.is_available())


def test_the_plain_layout_stays_for_half_precision() -> None:
    weight = torch.randn(4, 8).bfloat16()
    x = torch.randn(2, 8).bfloat16()
    assert torch.equal(Linear(weight)(x), torch.nn.functional.linear(x, weight))
