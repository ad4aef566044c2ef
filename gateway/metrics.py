"""Prometheus metrics of the gateway."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.version import build_version

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gateway.schedulers.schedulers import Schedulers

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


class GatewayMetrics:
    """The metrics of one gateway. Used on the event loop's thread."""

    def __init__(self, schedulers: Schedulers) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "quire_gateway_requests", "Requests and gRPC calls that have been answered, by path and status.",
            ("path", "status"), registry=registry,
        )  # fmt: skip
        self.open_requests = Gauge("quire_gateway_open_requests", "Requests that generate text now.", registry=registry)
        self.disconnects = Counter(
            "quire_gateway_disconnects", "Clients that went away before their answer ended.", registry=registry
        )
        self.slow_readers = Counter(
            "quire_gateway_slow_readers", "Clients dropped because they read too slowly.", registry=registry
        )
        self.refused_connections = Counter(
            "quire_gateway_refused_connections", "Connections beyond --max-connections.", registry=registry
        )
        self.first_token = Histogram(
            "quire_gateway_time_to_first_token_seconds",
            "Time from the end of a request's header to the first text of its stream.",
            buckets=_TTFT_S,
            registry=registry,
        )
        self.stream_failures = Counter(
            "quire_gateway_stream_failures",
            "Streams that failed after they began, whose answers count as 200, by the status they would have had.",
            ("status",), registry=registry,
        )  # fmt: skip
        for status in ("500", "503"):  # as in `may_fail`
            self.stream_failures.labels(status)
        # The other services have a series of this name, too.
        build_info = Gauge("quire_build_info", "Always 1", ("service", "version"), registry=registry)
        build_info.labels("gateway", build_version()).set(1)
        registry.register(_SchedulerFamilies(schedulers))

    def may_fail(self, path: str, *statuses: str) -> None:
        """Begins the series of these failures at 0. A rate does not see the failure with which a series begins."""
        for status in statuses:
            self.requests.labels(path, status)

    def page(self) -> bytes:
        return generate_latest(self._registry)


class _SchedulerFamilies(Collector):
    def __init__(self, schedulers: Schedulers) -> None:
        self._schedulers = schedulers

    def collect(self) -> Iterator[Metric]:
        ready = GaugeMetricFamily(
            "quire_gateway_scheduler_ready", "1 if the scheduler serves requests, otherwise 0.", labels=("scheduler",)
        )
        streams = GaugeMetricFamily(
            "quire_gateway_scheduler_streams", "Open streams of this gateway.", labels=("scheduler",)
        )
        for scheduler in self._schedulers.all:
            ready.add_metric((scheduler.address,), float(scheduler.is_ready))
            streams.add_metric((scheduler.address,), scheduler.call.num_streams)
        yield ready
        yield streams
        yield from self._routing()
        yield CounterMetricFamily(
            "quire_gateway_resumptions",
            "Streams that were continued after a break, and requests that were sent again.",
            value=self._schedulers.num_resumptions,
        )
        yield CounterMetricFamily(
            "quire_gateway_second_tries",
            "Requests that went to another scheduler because one has refused them; each further one counts.",
            value=self._schedulers.num_second_tries,
        )

    def _routing(self) -> Iterator[Metric]:
        """Yields what tells how requests find their schedulers."""
        choices = CounterMetricFamily(
            "quire_gateway_choices",
            "Requests sent to a scheduler, by why: the policy, a refusal by another one, a break, or none was ready.",
            labels=("scheduler", "reason"),
        )
        for (scheduler, reason), number in sorted(self._schedulers.chosen.items()):
            choices.add_metric((scheduler, reason), number)
        watched = GaugeMetricFamily(
            "quire_gateway_scheduler_watched",
            "1 if the scheduler reports its load and its cached prompts to this gateway, otherwise 0.",
            labels=("scheduler",),
        )
        blocks = GaugeMetricFamily(
            "quire_gateway_known_blocks",
            "Cached blocks of prompts that the scheduler has reported.",
            labels=("scheduler",),
        )
        events = CounterMetricFamily(
            "quire_gateway_prefix_events", "Blocks reported as cached or as forgotten.", labels=("scheduler",)
        )
        resyncs = CounterMetricFamily(
            "quire_gateway_prefix_resyncs",
            "Times that the scheduler had to report all its cached blocks again.",
            labels=("scheduler",),
        )
        for each in self._schedulers.all:
            label = (each.address,)
            watched.add_metric(label, float(each.watch.is_live))
            blocks.add_metric(label, each.num_known_blocks)
            events.add_metric(label, each.watch.num_events)
            resyncs.add_metric(label, each.watch.num_resyncs)
        yield GaugeMetricFamily(
            "quire_gateway_waiting_requests",
            "Requests that wait because the queues of all schedulers are full.",
            value=len(self._schedulers.waiting),
        )
        yield CounterMetricFamily(
            "quire_gateway_waited_requests",
            "Requests that had to wait because the queues of all schedulers were full.",
            value=self._schedulers.waiting.num_waited,
        )
        yield choices
        yield watched
        yield blocks
        yield events
        yield resyncs
