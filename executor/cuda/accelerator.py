"""All that a step needs of CUDA itself: streams, events, pinned memory, graphs. And the same without a GPU, at once.

compute   ── upload ── step ── ● end mark ── upload ── step ── ● ──►     the device thread's current stream
copies                          └── results to the host ── ●             waited for by the results thread
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Body = Callable[[], None]
"""Launches work on buffers that stay where they are, results included: memory taken on the way is anybody's after."""


class Mark(Protocol):
    """A point in the order of the device's work."""

    def wait(self) -> None:
        """Until the device has come here. Raises RuntimeError if it failed on the way."""
        ...

    def ns_since(self, earlier: "Mark") -> int:
        """Nanoseconds on the device's clock; both marks have been reached."""
        ...


class Accelerator(Protocol):
    """One device, and the one stream that its work is put on. Marks apart, all of it is for the device thread."""

    device: torch.device

    def working(self) -> AbstractContextManager[object]:
        """Within it, what this thread launches goes to the device's stream."""
        ...

    def host_bytes(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8 on the host, from which the device copies without holding anybody up."""
        ...

    def send(self, host: Tensor) -> Tensor:
        """A new tensor on the device. `host` must not change before a mark set after this has been reached."""
        ...

    def mark(self) -> Mark: ...

    def fetch(self, source: Tensor, target: Tensor, after: Mark) -> Mark:
        """Copies source to target, of `host_bytes`, once the device has come to `after`; beside its work, not in it.

        Nobody writes to source from then on. target holds it when the mark that is returned has been reached.
        """
        ...

    def capture(self, body: Body) -> Body:
        """What launches the same work again, on the same buffers. Runs body; that must change nothing that matters."""
        ...


@dataclass(frozen=True, slots=True)
class CudaMark:
    """An event."""

    event: torch.cuda.Event

    def wait(self) -> None:
        self.event.synchronize()

    def ns_since(self, earlier: Mark) -> int:
        if not isinstance(earlier, CudaMark):
            raise TypeError("marks of two kinds of devices")
        duration_ms: float = earlier.event.elapsed_time(self.event)
        return round(duration_ms * 1e6)


class CudaAccelerator:
    """A GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._compute = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._captures = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._memory = torch.cuda.graph_pool_handle()
        # Weights and buffers were written on other streams.
        torch.cuda.synchronize(device)

    def working(self) -> AbstractContextManager[object]:
        stack = ExitStack()
        stack.enter_context(torch.cuda.device(self.device))
        stack.enter_context(torch.cuda.stream(self._compute))
        return stack

    def host_bytes(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def send(self, host: Tensor) -> Tensor:
        return host.to(self.device, non_blocking=True)

    def mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._compute)
        return CudaMark(event)

    def fetch(self, source: Tensor, target: Tensor, after: Mark) -> Mark:
        if not isinstance(after, CudaMark):
            raise TypeError("a mark of another kind of device")
        self._copies.wait_event(after.event)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._copies):
            target.copy_(source, non_blocking=True)
            copied.record(self._copies)
        # Memory of the compute stream: once freed, it may be given out again before the copy is done.
        source.record_stream(self._copies)
        return CudaMark(copied)

    def capture(self, body: Body) -> Body:
        """All graphs share one pool of memory: they run one after the other.

        The first run is eager, so that what is made ready on first use (kernels, cuBLAS) is ready when the capture,
        in which nothing may be compiled, loaded or allocated by the driver, comes by. Other threads go on meanwhile:
        their calls are none of the capture's business (`thread_local`).
        """
        torch.cuda.synchronize(self.device)
        with torch.cuda.stream(self._captures):
            body()
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, stream=self._captures, capture_error_mode="thread_local"):
            body()
        return graph.replay


@dataclass(frozen=True, slots=True)
class EagerMark:
    """Reached as soon as it is set."""

    set_ns: int

    def wait(self) -> None:
        return

    def ns_since(self, earlier: Mark) -> int:
        if not isinstance(earlier, EagerMark):
            raise TypeError("marks of two kinds of devices")
        return self.set_ns - earlier.set_ns


class EagerAccelerator:
    """The CPU in a GPU's place: everything is done when it is launched."""

    device = torch.device("cpu")

    def working(self) -> AbstractContextManager[object]:
        return nullcontext()

    def host_bytes(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def send(self, host: Tensor) -> Tensor:
        return host.clone()

    def mark(self) -> Mark:
        return EagerMark(time.monotonic_ns())

    def fetch(self, source: Tensor, target: Tensor, after: Mark) -> Mark:
        target.copy_(source)
        return self.mark()

    def capture(self, body: Body) -> Body:
        body()
        return body


def accelerator_for(device: torch.device) -> Accelerator:
    """Raises RuntimeError if a CUDA device is not there."""
    return CudaAccelerator(device) if device.type == "cuda" else EagerAccelerator()
