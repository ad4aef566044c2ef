"""Everything specific to CUDA: streams, events, pinned memory and graphs; and a stand-in for machines without a GPU.

compute   ── upload ── step ── ● end mark ── upload ── step ── ● ──►     the device thread's current stream
copies                          └── results to the host ── ●             waited for by the results thread
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

# Threads sleep until an event is reached. A thread that polls takes the driver's lock each time, which delays the
# launches of the device thread, and it occupies a core.
_SLEEPS = True

Body = Callable[[], None]
"""Launches work whose inputs and results are in fixed buffers. Its temporaries are reused afterwards."""


class Mark(Protocol):
    """A point in the sequence of the device's work."""

    def wait(self) -> None:
        """Waits until the device reaches this point. Raises RuntimeError if it fails before that."""
        ...

    def ns_since(self, earlier: "Mark") -> int:
        """Returns nanoseconds on the device's clock. Both marks must have been reached."""
        ...


class Accelerator(Protocol):
    """One device with one stream of work. Only the device thread may use it; marks may be used by any thread."""

    device: torch.device

    def working(self) -> AbstractContextManager[object]:
        """Returns a context in which this thread's launches go to the device's stream."""
        ...

    def host_bytes(self, num_bytes: int) -> Tensor:
        """Returns [num_bytes] uint8 on the host, from which the device copies without blocking the host."""
        ...

    def send(self, host: Tensor) -> Tensor:
        """Returns a copy on the device. `host` must not change until a mark that is set after this has been reached."""
        ...

    def mark(self) -> Mark: ...

    def fetch(self, source: Tensor, target: Tensor, after: Mark) -> Mark:
        """Copies source to target, a result of `host_bytes`, once the device reaches `after`, in parallel to its work.

        source must not be written afterwards. The copy is complete when the returned mark has been reached.
        """
        ...

    def graph_memory(self) -> Any:
        """Returns a new pool of memory for graphs. They share it, as they run one after the other."""
        ...

    def capture(self, body: Body, memory: Any) -> Body:
        """Returns a function that launches the same work again. Runs body once before, so body must be repeatable.

        memory: a result of `graph_memory`. If the device runs out of memory, raises an error that `is_out_of_memory`
        knows, and the stream of this thread can be used as before.
        """
        ...

    def release(self) -> None:
        """Waits for all work, and gives back memory that is only cached."""
        ...


@dataclass(frozen=True, slots=True)
class CudaMark:
    """A mark that is a CUDA event."""

    event: torch.cuda.Event

    def wait(self) -> None:
        self.event.synchronize()

    def ns_since(self, earlier: Mark) -> int:
        if not isinstance(earlier, CudaMark):
            raise TypeError("marks of different kinds of devices")
        duration_ms: float = earlier.event.elapsed_time(self.event)
        return round(duration_ms * 1e6)


class CudaAccelerator:
    """An accelerator that is a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._compute = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._captures = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Weights and buffers were written in other streams.
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
        event = torch.cuda.Event(enable_timing=True, blocking=_SLEEPS)  # type: ignore[no-untyped-call]
        event.record(self._compute)
        return CudaMark(event)

    def fetch(self, source: Tensor, target: Tensor, after: Mark) -> Mark:
        if not isinstance(after, CudaMark):
            raise TypeError("a mark of another kind of device")
        self._copies.wait_event(after.event)
        copied = torch.cuda.Event(blocking=_SLEEPS)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._copies):
            target.copy_(source, non_blocking=True)
            copied.record(self._copies)
        # The memory belongs to the compute stream: once freed, it could be reused before the copy is done.
        source.record_stream(self._copies)
        return CudaMark(copied)

    def graph_memory(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def capture(self, body: Body, memory: Any) -> Body:
        """Captures a graph.

        The first run is eager: it prepares what is prepared on first use (kernels, cuBLAS), because nothing may be
        compiled, loaded or allocated by the driver during the capture. With `thread_local`, calls of other threads do
        not disturb the capture.
        """
        torch.cuda.synchronize(self.device)
        # torch's own context does not restore the stream when a capture cannot be begun or ended. This one does.
        with torch.cuda.stream(self._captures):
            body()
            torch.cuda.synchronize(self.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=memory, stream=self._captures, capture_error_mode="thread_local"):
                body()
        return graph.replay

    def release(self) -> None:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class EagerMark:
    """A mark that is reached as soon as it is set."""

    set_ns: int

    def wait(self) -> None:
        return

    def ns_since(self, earlier: Mark) -> int:
        if not isinstance(earlier, EagerMark):
            raise TypeError("marks of different kinds of devices")
        return self.set_ns - earlier.set_ns


class EagerAccelerator:
    """The CPU in place of a GPU: each launch does its work before it returns."""

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

    def graph_memory(self) -> Any:
        return None

    def capture(self, body: Body, memory: Any) -> Body:
        body()
        return body

    def release(self) -> None:
        return


def accelerator_for(device: torch.device) -> Accelerator:
    """Returns the accelerator of a device. Raises RuntimeError if there is no such CUDA device."""
    return CudaAccelerator(device) if device.type == "cuda" else EagerAccelerator()
