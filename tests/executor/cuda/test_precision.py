"""Matrix products take no shortcuts; `test_on_device.py` checks the products of a GPU."""

from __future__ import annotations

import pytest
import torch

from executor.cuda.precision import sum_in_float32
from executor.errors import ConfigError

PRODUCTS = torch.backends.cuda.matmul
NAMES = ("allow_tf32", "allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")


@pytest.fixture(autouse=True)
def _restored():
    before = {name: getattr(PRODUCTS, name) for name in NAMES}
    yield
    for name, value in before.items():
        setattr(PRODUCTS, name, value)


def test_all_shortcuts_are_switched_off() -> None:
    for name in NAMES:
        setattr(PRODUCTS, name, True)
    torch.backends.cudnn.allow_tf32 = True
    sum_in_float32()
    assert [getattr(PRODUCTS, name) for name in NAMES] == [False] * 3
    assert not torch.backends.cudnn.allow_tf32
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_shortcut_that_stays_on_is_an_error(monkeypatch) -> None:
    class Stubborn:
        allow_tf32 = property(lambda self: True, lambda self, value: None)

    monkeypatch.setattr(torch.backends.cuda, "matmul", Stubborn())
    with pytest.raises(ConfigError, match="allow_tf32 cannot be switched off: unset TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"):
        sum_in_float32()
