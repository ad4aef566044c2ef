"""Each request is one log record with ids, sizes and times, and without its prompt, output or cache salt."""

import io
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import grpc.aio
import pytest

from quire.log_rate import RateLimit
from quire.logs import configure
from quire.v1 import generation_pb2 as pb
from scheduler.core import FinishReason, QueueFull
from scheduler.telemetry import request_observer
from scheduler.telemetry.limits import LOG_LINES
from scheduler.telemetry.metrics import SchedulerMetrics
from scheduler.telemetry.request_observer import Caller, RequestObserver
from tests.support.scheduler.limits import counted
from tests.support.scheduler.scripted_engine import ScriptedEngine, ended
from tests.support.scheduler.servers import Served, Servers
from tests.support.scheduler.validator_rig import Unread

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"
SECRET = "xyzzy"


class Log:
    def __init__(self, stream: io.StringIO) -> None:
        self._stream = stream

    @property
    def text(self) -> str:
        for handler in logging.getLogger().handlers:
            handler.flush()
        return self._stream.getvalue()

    def of(self, event: str) -> list[dict[str, Any]]:
        records = [json.loads(line) for line in self.text.splitlines()]
        return [record for record in records if record["event"] == event]

    def fields(self, event: str) -> dict[str, Any]:
        """Returns the fields of the only such record, without those that every record has."""
        (record,) = self.of(event)
        assert record.pop("client").startswith(("ipv4:127.0.0.1:", "ipv6:"))
        assert record.pop("logger") == "scheduler.requests"
        for name in ("timestamp", "level", "service", "event"):
            del record[name]
        return record


@pytest.fixture
def log() -> Iterator[Log]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    stream = io.StringIO()
    configure("scheduler", "info", "json", stream)
    yield Log(stream)
    root.handlers[:] = handlers
    root.setLevel(level)


async def refusal(served: Served, request: pb.GenerateRequest) -> grpc.StatusCode:
    code: grpc.StatusCode = await served.generation.Generate(request).code()
    await served.idle()
    return code


async def test_ended_request_is_logged(servers: Servers, log: Log) -> None:
    served = await servers.start()
    request = pb.GenerateRequest(
        request_id="mine", text=f"hello {SECRET}", cache_salt=SECRET, stopping=pb.StoppingParams(stop=[SECRET])
    )
    call = served.generation.Generate(request, metadata=(("traceparent", TRACEPARENT),))
    submitted = (await served.engine.next_request()).start(num_cached_tokens=2)
    submitted.emit([60, 61, 62])
    submitted.finish(FinishReason.LENGTH, num_preemptions=1)
    assert [message async for message in call]
    fields = log.fields("request ended")
    times = {name: fields.pop(name) for name in ("queue_s", "ttft_s", "e2e_s")}
    assert 0 <= times["queue_s"] <= times["ttft_s"] <= times["e2e_s"] < 60
    assert fields == {
        "request_id": "mine",
        "trace_id": TRACE_ID,
        "engine_id": 1,
        "reason": "length",
        "is_resumed": False,
        "prompt_tokens": len(submitted.request.prompt_token_ids),
        "cached_tokens": 2,
        "generated_tokens": 3,
        "preemptions": 1,
    }
    assert SECRET not in log.text
    assert "hello" not in log.text


async def test_request_of_a_disconnected_client_is_logged_as_cancelled(servers: Servers, log: Log) -> None:
    served = await servers.start()
    call = served.generation.Generate(pb.GenerateRequest(text="hello"))
    submitted = (await served.engine.next_request()).start()
    submitted.emit([60, 61])
    call.cancel()
    await served.idle()
    fields = log.fields("request ended")
    assert (fields["request_id"], fields["reason"], fields["generated_tokens"]) == ("quire-1", "cancelled", 2)


async def test_tokens_before_a_deadline_are_counted(servers: Servers, log: Log) -> None:
    served = await servers.start()
    call = served.generation.Generate(pb.GenerateRequest(text="hello"))
    submitted = (await served.engine.next_request()).start()
    submitted.emit([60, 61])
    submitted.finish(FinishReason.DEADLINE)
    with pytest.raises(grpc.aio.AioRpcError):
        assert [message async for message in call]
    await served.idle()
    fields = log.fields("request ended")
    assert (fields["reason"], fields["generated_tokens"]) == ("deadline", 2)
    assert servers.metrics.measurements.num_generation_tokens == 2
    assert servers.metrics.measurements.histograms["quire_request_generation_tokens"].sum == 2


async def test_a_client_that_ends_its_call_at_its_deadline_has_not_left(servers: Servers, log: Log) -> None:
    """The engine of this test ends nothing at a deadline, so gRPC and the client are the first."""
    served = await servers.start()
    with pytest.raises(grpc.aio.AioRpcError):
        assert [message async for message in served.generation.Generate(pb.GenerateRequest(text="hello"), timeout=0.3)]
    await served.idle()
    assert log.fields("request ended")["reason"] == "deadline"
    assert servers.metrics.measurements.num_finished == {FinishReason.DEADLINE: 1}


async def test_refused_requests_are_logged(servers: Servers, log: Log) -> None:
    served = await servers.start()
    assert await refusal(served, pb.GenerateRequest(request_id="a\nb")) is grpc.StatusCode.INVALID_ARGUMENT
    assert log.fields("request refused") == {"request_id": "a\\nb", "status": "invalid_argument"}
    served.engine.refusal = QueueFull("no")
    assert await refusal(served, pb.GenerateRequest(text="x")) is grpc.StatusCode.RESOURCE_EXHAUSTED
    refused = log.of("request refused")[1]
    assert (refused["status"], refused["request_id"]) == ("resource_exhausted", "quire-1")


@pytest.mark.limited_log
def test_refusals_in_a_loop_write_ten_lines_a_second(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    (limit,) = [each for each in request_observer.log.filters if isinstance(each, RateLimit)]
    monkeypatch.setattr(limit, "_clock", lambda: 1e9)  # a second of its own
    observer = RequestObserver(SchedulerMetrics())
    with counted(LOG_LINES, 990):
        for _ in range(1000):
            observer.arrived(Caller(), request_id="x", is_chat=False).refused("invalid_argument")
    assert len(log.of("request refused")) == 10


def test_request_id_that_is_not_a_string_is_not_logged(log: Log) -> None:
    """JSON allows request ids of any type and size, and they are logged before they are checked."""
    RequestObserver(SchedulerMetrics()).arrived(Caller(), request_id=Unread([0]), is_chat=False).refused(
        "invalid_argument"
    )
    assert "request_id" not in log.of("request refused")[0]


async def test_bug_is_logged_with_the_request(
    servers: Servers, log: Log, counted: Callable[[], dict[str, int]]
) -> None:
    served = await servers.start()
    served.engine.refusal = RuntimeError("boom")
    request = pb.GenerateRequest(request_id="mine", text="x")
    call = served.generation.Generate(request, metadata=(("traceparent", TRACEPARENT),))
    assert await call.code() is grpc.StatusCode.INTERNAL
    (record,) = log.of("a request failed because of a bug")
    assert (record["request_id"], record["trace_id"]) == ("mine", TRACE_ID)
    assert "boom" in record["exception"]
    assert counted() == {"request": 1}
    assert 'quire_unexpected_errors_total{model_name="",where="request"}' in SchedulerMetrics().render().decode()


async def test_exemplars_have_ids_of_requests(servers: Servers) -> None:
    served = await servers.start()
    request = pb.GenerateRequest(request_id="mine", text="hello")
    call = served.generation.Generate(request, metadata=(("traceparent", TRACEPARENT),))
    submitted = (await served.engine.next_request()).start()
    submitted.emit([60])
    submitted.finish(FinishReason.LENGTH)
    assert [message async for message in call]
    for name in ("time_to_first_token", "request_queue_time", "request_prefill_time", "e2e_request_latency"):
        histogram = servers.metrics.measurements.histograms[f"quire_{name}_seconds"]
        assert [last[0] for last in histogram.exemplars if last] == [{"request_id": "mine", "trace_id": TRACE_ID}]


async def test_engine_logs_the_request_of_a_broken_stream(
    scripted_engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr("scheduler.requests.completion.Completion.add", broken)
    client = await scripted_engine.ask([1, 2, 3], 5)
    await scripted_engine.step(2)
    assert (await ended(client)).messages
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.name == "scheduler.engine.dispatcher"
    assert vars(record)["request_id"] == "quire-1"
    assert scripted_engine.metrics.measurements.num_finished[FinishReason.ERROR] == 1
