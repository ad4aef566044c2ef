"""What Prometheus sees of an executor. Names are part of the public interface.

Every sample is labelled with the model and with the executor: the address that it listens on, so that several under one
scheduler can be told apart, and a new process in an old one's place is the same executor.
"""

import math
import socket
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from executor.plans.plan import StepTimings
from quire.addresses import UNIX, HostPort, listen_error
from quire.histogram import Histogram
from quire.version import build_version

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

_STEP_BUCKETS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0
)  # fmt: skip
_IDLE_WINDOW_S = 10.0
_PHASES = ("queue", "prepare", "forward", "sample")
_ANY_HOST = ("0.0.0.0", "::")


class Metrics(Collector):
    """A registry of its own. Steps are recorded by one thread, and read by another when somebody scrapes."""

    def __init__(self, model_name: str, address: str) -> None:
        """`address`: what the executor was told to listen on."""
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "executor": executor_label(address)}
        self._phases = {phase: Histogram(_STEP_BUCKETS_S) for phase in _PHASES}
        self._started_s = time.time()
        self._last_step_s = self._started_s
        self._memory_bytes: dict[str, int] = {}
        self._startup_s: dict[str, float] = {}
        self._idle = IdleRatio()
        self._http: WSGIServer | None = None
        self.registry.register(self)

    def close(self) -> None:
        """Stops serving. No error if nothing is served."""
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
            self._http = None

    def observe_step(self, timings: StepTimings) -> None:
        durations_ns = (timings.queue_ns, timings.prepare_ns, timings.forward_ns, timings.sample_ns)
        for durations, duration_ns in zip(self._phases.values(), durations_ns, strict=True):
            durations.observe(duration_ns * 1e-9)
        self._last_step_s = time.time()
        self._idle.add(timings.idle_ns * 1e-9, timings.busy_ns * 1e-9)

    def set_memory(self, kind: str, num_bytes: int) -> None:
        self._memory_bytes[kind] = num_bytes

    def set_startup(self, phase: str, duration_s: float) -> None:
        self._startup_s[phase] = duration_s

    def listens_on(self, address: str) -> None:
        """The address with its real port."""
        self._labels["executor"] = executor_label(address)

    def serve(self, address: str) -> None:
        """Serves /metrics at "host:port", from a thread, until `close`. Raises AddressInUse and AddressUnusable."""
        wanted = HostPort.parse(address)
        try:
            self._http, _ = start_http_server(wanted.port, addr=wanted.host, registry=self.registry)
        except OSError as error:
            raise listen_error(address, error) from None

    def describe(self) -> list[Metric]:
        return []  # asked for when registering; the names are known to be ours

    def collect(self) -> Iterator[Metric]:
        yield self._gauge("quire_build_info", "Always 1", ("service", "version"), {("executor", build_version()): 1.0})
        durations = HistogramMetricFamily(
            "quire_executor_step_duration_seconds", "Time of one step by phase", labels=[*self._labels, "phase"]
        )
        for phase, each in self._phases.items():
            durations.add_metric([*self._labels.values(), phase], each.cumulative(), each.sum)
        yield durations
        yield self._gauge(
            "quire_executor_last_step_timestamp_seconds", "End of the last step; before the first, of the start",
            (), {(): self._last_step_s},
        )  # fmt: skip
        yield self._gauge(
            "quire_executor_start_timestamp_seconds", "When this process had its model and began to listen",
            (), {(): self._started_s},
        )  # fmt: skip
        yield self._gauge(
            "quire_executor_memory_bytes", "Memory held, by kind",
            ("kind",), {(kind,): float(num_bytes) for kind, num_bytes in self._memory_bytes.items()},
        )  # fmt: skip
        yield self._gauge(
            "quire_executor_startup_seconds", "Time from start to ready, by phase",
            ("phase",), {(phase,): duration_s for phase, duration_s in self._startup_s.items()},
        )  # fmt: skip
        yield self._gauge(
            "quire_executor_idle_ratio",
            f"Share of the last {_IDLE_WINDOW_S:.0f} s or so in which the device thread had no plan",
            (), {(): self._idle.current()},
        )  # fmt: skip

    def _gauge(self, name: str, text: str, labels: tuple[str, ...], values: dict[tuple[str, ...], float]) -> Metric:
        family = GaugeMetricFamily(name, text, labels=[*self._labels, *labels])
        for own, value in values.items():
            family.add_metric([*self._labels.values(), *own], value)
        return family


def executor_label(address: str) -> str:
    """An address that tells executors apart: where it names no host, this machine's."""
    if address.startswith(UNIX):
        return address
    listens = HostPort.parse(address)
    return f"{socket.gethostname()}:{listens.port}" if listens.host in _ANY_HOST else address


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
