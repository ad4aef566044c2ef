"""What Prometheus sees of an executor. Names are part of the public interface."""

import math
import time
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Gauge, Histogram, start_http_server

from executor.errors import AddressInUse
from executor.plan import StepTimings

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

_STEP_BUCKETS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0
)  # fmt: skip
_IDLE_WINDOW_S = 10.0


class Metrics:
    """A registry of its own, labelled with the model's name."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        labels = ("model_name",)
        durations = Histogram(
            "quire_executor_step_duration_seconds",
            "Time of one step by phase",
            (*labels, "phase"),
            buckets=_STEP_BUCKETS_S,
            registry=self.registry,
        )
        self._queue, self._prepare, self._forward, self._sample = (
            durations.labels(model_name, phase) for phase in ("queue", "prepare", "forward", "sample")
        )
        self._last_step = Gauge(
            "quire_executor_last_step_timestamp_seconds",
            "End of the last step",
            labels,
            registry=self.registry,
        ).labels(model_name)
        self._memory = Gauge(
            "quire_executor_memory_bytes", "Memory held, by kind", (*labels, "kind"), registry=self.registry
        )
        self._startup = Gauge(
            "quire_executor_startup_seconds",
            "Time from start to ready, by phase",
            (*labels, "phase"),
            registry=self.registry,
        )
        self._idle = IdleRatio()
        Gauge(
            "quire_executor_idle_ratio",
            f"Share of the last {_IDLE_WINDOW_S:.0f} s or so in which the device thread had no plan",
            labels,
            registry=self.registry,
        ).labels(model_name).set_function(self._idle.current)
        self._model_name = model_name
        self._http: WSGIServer | None = None

    @property
    def http_port(self) -> int | None:
        """Where /metrics is served; None before `serve`."""
        return None if self._http is None else self._http.server_port

    def close(self) -> None:
        """Stops serving. No error if nothing is served."""
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
            self._http = None

    def observe_step(self, timings: StepTimings) -> None:
        self._queue.observe(timings.queue_ns * 1e-9)
        self._prepare.observe(timings.prepare_ns * 1e-9)
        self._forward.observe(timings.forward_ns * 1e-9)
        self._sample.observe(timings.sample_ns * 1e-9)
        self._last_step.set_to_current_time()
        self._idle.add(timings.idle_ns * 1e-9, timings.busy_ns * 1e-9)

    def set_memory(self, kind: str, num_bytes: int) -> None:
        self._memory.labels(self._model_name, kind).set(num_bytes)

    def set_startup(self, phase: str, duration_s: float) -> None:
        self._startup.labels(self._model_name, phase).set(duration_s)

    def serve(self, address: str) -> None:
        """Serves /metrics at "host:port" from a thread of its own until `close`. Raises AddressInUse."""
        host, _, port = address.rpartition(":")
        try:
            self._http, _ = start_http_server(int(port), addr=host, registry=self.registry)
        except OSError as error:
            raise AddressInUse(f"metrics cannot listen on {address}: {error.strerror or error}") from None


class IdleRatio:
    """An average of idle time over all time, in which what happened t seconds ago weighs exp(-t / window)."""

    def __init__(self) -> None:
        self._ratio = 1.0
        self._measured_at_s = time.monotonic()

    def add(self, idle_s: float, busy_s: float) -> None:
        """A step that took `busy_s`, after `idle_s` without one, has just ended."""
        self._ratio = _faded(_faded(self._ratio, 1.0, idle_s), 0.0, busy_s)
        self._measured_at_s = time.monotonic()

    def current(self) -> float:
        """The time since the last step ended counts as idle."""
        return _faded(self._ratio, 1.0, time.monotonic() - self._measured_at_s)


def _faded(ratio: float, towards: float, duration_s: float) -> float:
    return towards + (ratio - towards) * math.exp(-duration_s / _IDLE_WINDOW_S)
