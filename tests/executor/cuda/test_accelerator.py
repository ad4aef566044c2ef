"""The parts of the CUDA accelerator that can be checked without a GPU: how it asks torch for events."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from executor.cuda.accelerator import CudaAccelerator


class Event:
    """An event that records how it was made."""

    made: list[dict[str, bool]]

    def __init__(self, **options: bool) -> None:
        self.made.append(options)

    def record(self, stream: object) -> None:
        assert isinstance(stream, Stream)


class Stream:
    """A stream that accepts anything."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, Event)


class Source:
    """A tensor on the device, as far as `fetch` needs one."""

    def record_stream(self, stream: Stream) -> None:
        assert isinstance(stream, Stream)


class Target:
    """A tensor on the host, as far as `fetch` needs one."""

    def copy_(self, source: Source, non_blocking: bool) -> None:
        assert non_blocking


@pytest.fixture
def accelerator(monkeypatch) -> CudaAccelerator:
    Event.made = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return CudaAccelerator(torch.device("cuda:0"))


def test_threads_sleep_while_they_wait_for_events(accelerator) -> None:
    mark = accelerator.mark()
    accelerator.fetch(Source(), Target(), mark)
    assert Event.made == [{"enable_timing": True, "blocking": True}, {"blocking": True}]
