"""The memory of a GPU, with torch's numbers given by the test, and errors about a lack of memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from executor.device.device_memory import CudaMemory, fitting, is_out_of_memory
from executor.errors import OutOfMemory
from kernels.memory import zeros


class Card:
    """A GPU with 1,000 bytes, of which other processes take 100. reserved: what torch holds, used or cached."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.used = self.reserved = self.peak = self.driver = 0
        fakes = {
            "synchronize": lambda device: None,
            "empty_cache": lambda: self.reserve(self.used),
            "reset_peak_memory_stats": lambda device: setattr(self, "peak", self.reserved),
            "mem_get_info": lambda device: (900 - self.reserved - self.driver, 1000),
            "max_memory_reserved": lambda device: self.peak,
            "memory_reserved": lambda device: self.reserved,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def reserve(self, reserved: int) -> None:
        self.reserved, self.peak = reserved, max(self.peak, reserved)


@pytest.fixture
def card(monkeypatch) -> Card:
    return Card(monkeypatch)


def test_cached_memory_is_free_and_peaks_are_not(card) -> None:
    memory = CudaMemory(torch.device("cuda:0"))
    card.used = 200
    card.reserve(650)
    assert memory.settle() == 700
    assert memory.least_free() == 700
    card.reserve(500)
    assert memory.least_free() == 400
    card.reserve(300)
    assert memory.least_free() == 400, "torch has given memory back since"
    card.driver = 30
    assert memory.least_free() == 370, "the driver's memory counts too"
    assert memory.settle() == 670


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("full"), True),
        (RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("unable to mmap 16 bytes from file <x>: Cannot allocate memory (12)"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_errors_about_memory_are_recognised(error, expected) -> None:
    assert is_out_of_memory(error) is expected


def test_an_error_that_hides_a_lack_of_memory_is_recognised() -> None:
    hiding = RuntimeError("operation failed due to a previous error during capture")
    assert not is_out_of_memory(hiding)
    hiding.__context__ = torch.OutOfMemoryError("full")
    assert is_out_of_memory(hiding)


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(OutOfMemory, match=r"^weights on cuda:0: CUDA out of memory\. Tried to allocate 20 GiB$"):
        with fitting("weights on cuda:0"):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB\nmore")
    with pytest.raises(RuntimeError, match="another"), fitting("weights"):
        raise RuntimeError("another")


def _nothing_said() -> None:
    raise MemoryError


@pytest.mark.parametrize(
    ("allocate", "message"),
    [
        (lambda: torch.empty(1 << 60, dtype=torch.uint8), "can't allocate memory"),
        (lambda: np.zeros(1 << 60, dtype=np.uint8), "Unable to allocate 1.00 EiB"),
        (lambda: zeros((1 << 60,), torch.uint8), "1152921504606846976 bytes"),
        (_nothing_said, "out of memory"),
    ],
)
def test_a_lack_of_the_hosts_memory_is_named(allocate, message) -> None:
    with pytest.raises(OutOfMemory) as caught, fitting("a step"):
        allocate()
    assert str(caught.value).startswith("a step: ")
    assert message in str(caught.value)
