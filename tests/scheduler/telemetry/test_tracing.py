"""Traces reach a test collector, and a missing collector does not affect serving."""

import asyncio
import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc.aio
import pytest

from quire.v1 import generation_pb2 as pb
from quire.v1.generation_pb2_grpc import GenerationStub
from scheduler.core import FinishReason, QueueFull
from tests.support.paths import ROOT
from tests.support.scheduler.launcher import Launcher, request, rest_of
from tests.support.scheduler.servers import Served, Servers

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="OpenTelemetry is not installed (extra otel)")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

import scheduler.telemetry.tracing as otel

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
SECRET = "xyzzy"


class Collector:
    """A collector that receives OTLP over HTTP on its own port."""

    def __init__(self, status: int = 200) -> None:
        requests: list[ExportTraceServiceRequest] = []
        self.requests = requests
        self.bodies: list[bytes] = []
        bodies = self.bodies

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                assert self.headers["Content-Type"] == "application/x-protobuf"
                body = self.rfile.read(int(self.headers["Content-Length"]))
                bodies.append(body)
                requests.append(ExportTraceServiceRequest.FromString(body))
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(status)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    @property
    def spans(self) -> dict[str, Span]:
        """The received spans by name; names are unique."""
        found: dict[str, Span] = {}
        for each in self.requests:
            for resource in each.resource_spans:
                names = {attribute.key: attribute.value.string_value for attribute in resource.resource.attributes}
                assert names["service.name"] == "quire-scheduler"
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        assert span.name not in found
                        found[span.name] = span
        return found

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture
def tracer(collector: Collector) -> Iterator[Any]:
    tracer = otel.OtlpTracer(collector.endpoint)
    yield tracer
    tracer.close()


async def start(servers: Servers, tracer: Any) -> Served:
    served = await servers.start()
    served.intake._observer.tracer = tracer
    return served


async def traced(served: Served, message: pb.GenerateRequest, flags: str = "01") -> None:
    """Runs a request of three tokens as part of a client's trace."""
    call = served.generation.Generate(message, metadata=(("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-{flags}"),))
    submitted = (await served.engine.next_request()).start(num_cached_tokens=2)
    submitted.emit([60, 61, 62])
    submitted.finish(FinishReason.EOS, num_preemptions=1)
    assert [message async for message in call]
    await served.idle()


def attributes(span: Span) -> dict[str, Any]:
    values = {}
    for attribute in span.attributes:
        kind = attribute.value.WhichOneof("value")
        value = getattr(attribute.value, kind)
        values[attribute.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return values


async def test_request_and_its_phases_are_spans(servers: Servers, collector: Collector, tracer: Any) -> None:
    served = await start(servers, tracer)
    before_ns = time.time_ns()
    await traced(
        served,
        pb.GenerateRequest(
            request_id="mine",
            text=f"hello {SECRET}",
            cache_salt=SECRET,
            sampling=pb.SamplingParams(temperature=0.5, top_p=0.75, top_k=7),
            stopping=pb.StoppingParams(max_tokens=9, stop=[SECRET]),
        ),
    )
    after_ns = time.time_ns()
    tracer.close()
    spans = collector.spans
    root = spans.pop("text_completion tiny")
    assert root.trace_id.hex() == TRACE_ID
    assert root.parent_span_id.hex() == PARENT_ID
    assert root.kind == Span.SPAN_KIND_SERVER
    assert set(spans) == {"queue", "prefill", "decode"}
    assert {span.parent_span_id for span in spans.values()} == {root.span_id}
    assert {span.trace_id for span in spans.values()} == {root.trace_id}
    # The phases follow each other, cover the whole request, and have the right time of day.
    edges = [
        (spans[name].start_time_unix_nano, spans[name].end_time_unix_nano) for name in ("queue", "prefill", "decode")
    ]
    assert [end for _, end in edges[:-1]] == [begin for begin, _ in edges[1:]]
    assert (edges[0][0], edges[-1][1]) == (root.start_time_unix_nano, root.end_time_unix_nano)
    slack_ns = 50_000_000  # difference between the clock of the metrics and the time of day
    assert before_ns - slack_ns <= edges[0][0] <= edges[-1][1] <= after_ns + slack_ns
    found = attributes(root)
    first_token_s = (edges[2][0] - edges[0][0]) / 1e9
    assert found.pop("gen_ai.response.time_to_first_chunk") == pytest.approx(first_token_s, abs=1e-6)
    assert found == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "quire",
        "gen_ai.request.stream": True,
        "gen_ai.request.model": "tiny",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.75,
        "gen_ai.request.top_k": 7,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.response.model": "tiny",
        "gen_ai.response.id": "mine",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": len(served.engine.submitted[1].request.prompt_token_ids),
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "quire.engine_id": 1,
        "quire.finish_reason": "eos",
        "quire.num_preemptions": 1,
    }
    assert not any(SECRET.encode() in body for body in collector.bodies)


async def test_client_decides_whether_spans_are_recorded(servers: Servers, collector: Collector, tracer: Any) -> None:
    served = await start(servers, tracer)
    await traced(served, pb.GenerateRequest(text="hello"), flags="00")
    tracer.close()
    assert collector.spans == {}
    exemplars = servers.metrics.measurements.histograms["quire_e2e_request_latency_seconds"].exemplars
    assert [last[0]["trace_id"] for last in exemplars if last] == [TRACE_ID]


async def test_request_without_a_trace_starts_one(servers: Servers, collector: Collector, tracer: Any) -> None:
    served = await start(servers, tracer)
    call = served.generation.Generate(pb.GenerateRequest(text="hello"))
    (await served.engine.next_request()).start()
    call.cancel()
    await served.idle()
    served.engine.refusal = QueueFull("no")
    assert await served.generation.Generate(pb.GenerateRequest(text="hello")).code()
    await served.idle()
    tracer.close()
    spans = collector.spans
    assert set(spans) == {"text_completion tiny", "queue", "prefill", "text_completion"}
    ended, refused = spans["text_completion tiny"], spans["text_completion"]
    assert ended.parent_span_id == refused.parent_span_id == b""
    assert ended.trace_id != refused.trace_id
    exemplars = servers.metrics.measurements.histograms["quire_e2e_request_latency_seconds"].exemplars
    assert [last[0]["trace_id"] for last in exemplars if last] == [ended.trace_id.hex()]
    assert attributes(ended)["quire.finish_reason"] == "cancelled"
    assert attributes(refused)["error.type"] == "resource_exhausted"
    assert refused.status.code == 0, "not an error of the server"


@pytest.mark.parametrize("kind", ["refused", "silent", "broken"])
async def test_dead_collector_does_not_affect_serving(
    servers: Servers, kind: str, monkeypatch: pytest.MonkeyPatch, silent_port: int
) -> None:
    broken = Collector(status=500)
    endpoint = {
        "refused": "http://127.0.0.1:1",
        "silent": f"http://127.0.0.1:{silent_port}",
        "broken": broken.endpoint,
    }[kind]
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    tracer = otel.OtlpTracer(endpoint)
    served = await start(servers, tracer)
    for _ in range(30):
        await traced(served, pb.GenerateRequest(text="hello"))
    assert servers.metrics.measurements.num_finished[FinishReason.EOS] == 30
    await asyncio.to_thread(tracer.close)  # returns although nothing was delivered
    broken.close()


@pytest.fixture
def silent_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


async def test_scheduler_process_sends_traces(launcher: Launcher, collector: Collector) -> None:
    scheduler = await launcher.scheduler(await launcher.executor(), otlp_endpoint=collector.endpoint)
    await scheduler.ready()
    async with grpc.aio.insecure_channel(scheduler.addresses["grpc"]) as channel:
        assert await rest_of(GenerationStub(channel).Generate(request(3)))
    scheduler.signal(signal.SIGTERM)
    assert await scheduler.ended() == (0, False)
    assert set(collector.spans) == {"text_completion fake", "queue", "prefill", "decode"}


def test_missing_opentelemetry_is_a_configuration_error() -> None:
    script = """
import sys
sys.modules["opentelemetry"] = None
import scheduler.main
from scheduler.config import SchedulerConfig
print(scheduler.main.run(SchedulerConfig(
    model="models/tiny", listen="127.0.0.1:0", http_listen="127.0.0.1:0", otlp_endpoint="http://127.0.0.1:4318")))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "2\n"
    assert "pip install 'quire[otel]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_opentelemetry_is_loaded_only_if_needed() -> None:
    script = "import scheduler.main, sys; print([name for name in sys.modules if name.startswith('opentelemetry')])"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
