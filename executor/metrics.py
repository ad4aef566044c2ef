"""The Prometheus metrics of an executor. Their names are part of the public interface.

Each sample has the labels of the model and of the executor. The executor's label is the address it listens on: it tells
executors under one scheduler apart and stays the same when a process is restarted.
"""

import math
import socket
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from executor.grammars.masks import GrammarCounts
from executor.metrics_server import serve_metrics
from executor.plans.plan import EndReason, StepOutput, StepTimings
from executor.sampling.finite import num_bad_reports
from quire.addresses import UNIX, HostPort, listen_error
from quire.histogram import Histogram
from quire.unexpected import NUM_UNEXPECTED
from quire.version import build_version

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

_STEP_BUCKETS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0
)  # fmt: skip
_IDLE_WINDOW_S = 10.0
_PHASES = ("queue", "prepare", "forward", "sample")
_UNEXPECTED = ("plan", "step", "delivery", "between_steps", "idle_work", "preparation", "grammar")
_ANY_HOST = ("0.0.0.0", "::")


class Metrics(Collector):
    """Metrics in a registry of their own. One thread records steps, and another reads them for a scrape."""

    def __init__(
        self,
        model_name: str,
        address: str,
        grammars: GrammarCounts | None = None,
        busy_since_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        """Starts without samples of steps. `address` is the configured address to listen on.

        grammars: counts that executor/grammars updates; None: there are no grammars.
        busy_since_s: returns since when a step has been under way (time.monotonic); None: none is.
        """
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "executor": executor_label(address)}
        self._phases = {phase: Histogram(_STEP_BUCKETS_S) for phase in _PHASES}
        self._started_s = time.time()
        self._last_step_s = self._started_s
        self._num_not_finite = 0
        self._num_grammar_ends = 0
        self._grammars = grammars or GrammarCounts()
        self._memory_bytes: dict[str, int] = {}
        self._startup_s: dict[str, float] = {}
        self._graphs: dict[str, int] = {}
        self._idle = IdleRatio()
        self._busy_since_s = busy_since_s
        self._http: WSGIServer | None = None
        self.registry.register(self)

    def close(self) -> None:
        """Stops serving. Does nothing if nothing is served."""
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
            self._http = None

    def observe(self, output: StepOutput) -> None:
        """Records a step that has ended."""
        num_ended = int(np.count_nonzero(output.end_reasons == EndReason.NOT_FINITE))
        self._num_not_finite += num_ended + num_bad_reports(output.reports)
        self._num_grammar_ends += int(np.count_nonzero(output.end_reasons == EndReason.GRAMMAR))
        self.observe_step(output.timings)

    def observe_step(self, timings: StepTimings) -> None:
        durations_ns = (timings.queue_ns, timings.prepare_ns, timings.forward_ns, timings.sample_ns)
        for durations, duration_ns in zip(self._phases.values(), durations_ns, strict=True):
            durations.observe(duration_ns * 1e-9)
        self._last_step_s = time.time()
        self._idle.add(timings.idle_ns * 1e-9, timings.busy_ns * 1e-9)

    def set_memory(self, kind: str, num_bytes: int) -> None:
        self._memory_bytes[kind] = num_bytes

    def set_graphs(self, state: str, count: int) -> None:
        self._graphs[state] = count

    def set_startup(self, phase: str, duration_s: float) -> None:
        self._startup_s[phase] = duration_s

    def listens_on(self, address: str) -> None:
        """Sets the address with its real port."""
        self._labels["executor"] = executor_label(address)

    def serve(self, address: str, loop_silent_s: Callable[[], float]) -> None:
        """Serves /metrics and /healthz at "host:port", from a thread, until `close`.

        loop_silent_s: returns the seconds since the event loop last ran. Raises AddressInUse and AddressUnusable.
        """
        wanted = HostPort.parse(address)
        try:
            self._http = serve_metrics(wanted.host, wanted.port, self.registry, loop_silent_s)
        except OSError as error:
            raise listen_error(address, error) from None

    def describe(self) -> list[Metric]:
        return []  # called at registration; there are no other collectors to conflict with

    def collect(self) -> Iterator[Metric]:
        yield self._gauge("quire_build_info", "Always 1", ("service", "version"), {("executor", build_version()): 1.0})
        durations = HistogramMetricFamily(
            "quire_executor_step_duration_seconds", "Duration of one step, by phase", labels=[*self._labels, "phase"]
        )
        for phase, each in self._phases.items():
            durations.add_metric([*self._labels.values(), phase], each.cumulative(), each.sum)
        yield durations
        yield self._counter(
            "quire_executor_not_finite",
            "Sequences, and reports on beams or prompts, that failed because logits were not finite",
            self._num_not_finite,
        )
        yield self._counter(
            "quire_executor_grammars_compiled",
            "Grammars that were compiled: those that were not used lately", self._grammars.num_compiled,
        )  # fmt: skip
        yield self._counter(
            "quire_executor_grammar_ends",
            "Sequences that failed because their grammar could not be followed", self._num_grammar_ends,
        )  # fmt: skip
        yield self._counter(
            "quire_executor_grammar_deferred",
            "Masks of grammars for which a step did not wait: their sequences left the batch for a while",
            self._grammars.num_deferred,
        )
        yield self._counter(
            "quire_executor_grammar_wait_seconds",
            "Time for which steps waited for the masks of grammars", self._grammars.waited_ns * 1e-9,
        )  # fmt: skip
        errors = CounterMetricFamily(
            "quire_executor_unexpected_errors",
            "Exceptions that no code expected and the executor survived, by where",
            labels=[*self._labels, "where"],
        )
        for where in _UNEXPECTED:
            errors.add_metric([*self._labels.values(), where], NUM_UNEXPECTED[where])
        yield errors
        yield self._gauge(
            "quire_executor_last_step_timestamp_seconds",
            "Time at which the last step ended; before the first step, the time of the start",
            (), {(): self._last_step_s},
        )  # fmt: skip
        yield self._gauge(
            "quire_executor_start_timestamp_seconds",
            "Time at which this process had loaded its model and began to listen",
            (), {(): self._started_s},
        )  # fmt: skip
        yield self._gauge(
            "quire_executor_memory_bytes", "Memory in use, by kind: the sum over all ranks",
            ("kind",), {(kind,): float(num_bytes) for kind, num_bytes in self._memory_bytes.items()},
        )  # fmt: skip
        yield self._gauge(
            "quire_executor_startup_seconds", "Time from start to ready, by phase",
            ("phase",), {(phase,): duration_s for phase, duration_s in self._startup_s.items()},
        )  # fmt: skip
        yield self._gauge(
            "quire_executor_graphs",
            "CUDA graphs of decode steps, by state: missing for lack of memory, which makes their steps slower",
            ("state",), {(state,): float(count) for state, count in self._graphs.items()},
        )  # fmt: skip
        yield self._gauge(
            "quire_executor_idle_ratio",
            f"Share of about the last {_IDLE_WINDOW_S:.0f} s in which the device thread had no plan",
            (), {(): self._idle.current(self._busy_since_s())},
        )  # fmt: skip

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _gauge(self, name: str, text: str, labels: tuple[str, ...], values: dict[tuple[str, ...], float]) -> Metric:
        family = GaugeMetricFamily(name, text, labels=[*self._labels, *labels])
        for own, value in values.items():
            family.add_metric([*self._labels.values(), *own], value)
        return family


def executor_label(address: str) -> str:
    """Returns an address that tells executors apart: with this machine's name if the address has no host."""
    if address.startswith(UNIX):
        return address
    listens = HostPort.parse(address)
    return f"{socket.gethostname()}:{listens.port}" if listens.host in _ANY_HOST else address


class IdleRatio:
    """The average share of idle time, in which an instant t seconds ago has the weight exp(-t / window)."""

    def __init__(self) -> None:
        self._ratio = 1.0
        self._measured_at_s = time.monotonic()

    def add(self, idle_s: float, busy_s: float) -> None:
        """Adds a step that has just ended: it took `busy_s`, after `idle_s` without a step."""
        self._ratio = _faded(_faded(self._ratio, 1.0, idle_s), 0.0, busy_s)
        self._measured_at_s = time.monotonic()

    def current(self, busy_since_s: float | None) -> float:
        """Returns the ratio now. The time since the last step ended counts as idle until the next one began.

        busy_since_s: time at which the step under way began; None: there is none.
        """
        measured_at_s, now_s = self._measured_at_s, time.monotonic()
        began_s = now_s if busy_since_s is None else min(now_s, max(busy_since_s, measured_at_s))
        return _faded(_faded(self._ratio, 1.0, began_s - measured_at_s), 0.0, now_s - began_s)


def _faded(ratio: float, towards: float, duration_s: float) -> float:
    return towards + (ratio - towards) * math.exp(-duration_s / _IDLE_WINDOW_S)
