"""The check of a device after a failed step."""

from __future__ import annotations

import pytest
import torch

from executor.device.device import device_is_sane


@pytest.mark.parametrize(
    ("error", "expected"),
    [(torch.OutOfMemoryError("full"), True), (RuntimeError("CUDA error: an illegal memory access"), False)],
)
def test_a_full_device_is_sane_and_a_broken_one_is_not(error, expected, monkeypatch) -> None:
    assert device_is_sane(torch.device("cpu"))

    def ones(size: int, device: torch.device) -> torch.Tensor:
        raise error

    monkeypatch.setattr(torch, "ones", ones)
    assert device_is_sane(torch.device("cpu")) is expected
