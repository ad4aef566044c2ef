"""Both clients against a scripted server: each test of common behaviour runs with both."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

import quire
from quire.v1 import admin_pb2, generation_pb2
from tests.support.client.calls import KINDS, SyncCalls
from tests.support.client.scripted_server import ScriptedServer, delta, endless, finished, refusal, replies, started
from tests.support.waiting import until


@KINDS
def test_events_are_typed_and_in_order(server: ScriptedServer, kind: type[SyncCalls]) -> None:
    unknown = generation_pb2.GenerateResponse()  # a kind of event that a newer server may send
    usage = {"prompt_tokens": 3, "completion_tokens": 3, "cached_tokens": 2, "num_preemptions": 1}
    server.script = replies(
        started("mine", 3, 2),
        delta(0, "ab", 7),
        unknown,
        delta(0, "", 8, 9),
        finished(0, generation_pb2.FINISH_REASON_LENGTH, **usage),
    )
    assert kind(server.address).events("hello") == [
        quire.Started("mine", 3, 2),
        quire.Delta(0, "ab", (7,)),
        quire.Delta(0, "", (8, 9)),
        quire.Finished(0, quire.FinishReason.LENGTH, quire.Usage(3, 3, 2, 1)),
    ]


@KINDS
def test_complete_assembles_interleaved_sequences(server: ScriptedServer, kind: type[SyncCalls]) -> None:
    server.script = replies(
        started("id", 4, 1),
        delta(1, "x", 1),
        delta(0, "a", 2),
        delta(1, "yz", 3, 4),
        finished(1, generation_pb2.FINISH_REASON_STOP, completion_tokens=3),
        delta(0, "é", 5),
        finished(0, generation_pb2.FINISH_REASON_EOS, completion_tokens=2),
    )
    completion = kind(server.address).call("complete", [1, 2, 3, 4], n=2)
    assert completion.texts == ("aé", "xyz")
    assert [sequence.token_ids for sequence in completion.sequences] == [(2, 5), (1, 3, 4)]
    assert [sequence.reason for sequence in completion.sequences] == ["eos", "stop"]
    assert (completion.text, completion.token_ids, completion.reason) == (
        "aé",
        (2, 5),
        quire.FinishReason.EOS,
    )
    assert completion.usage.completion_tokens == 2
    assert (completion.request_id, completion.prompt_tokens, completion.cached_tokens) == ("id", 4, 1)


@KINDS
@pytest.mark.parametrize(
    "responses",
    [
        (),
        (started(),),
        (started(), delta(0, "a", 1)),
        (started(), delta(0, "a", 1), delta(1, "b", 2), finished(0)),
        (delta(0, "a", 1), finished(0)),
        (started(), finished(0, generation_pb2.FINISH_REASON_UNSPECIFIED)),
        (started(), finished(0, 99)),
    ],
    ids=["nothing", "no tokens", "no end", "one of two ends", "no start", "no reason", "unknown reason"],
)
def test_an_answer_that_breaks_the_protocol_is_an_internal_error(
    server: ScriptedServer, kind: type[SyncCalls], responses: tuple[Any, ...]
) -> None:
    server.script = replies(*responses)
    with pytest.raises(quire.InternalError):
        kind(server.address).call("complete", "p")


@KINDS
@pytest.mark.parametrize(
    ("code", "error"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, quire.InvalidRequestError),
        (grpc.StatusCode.OUT_OF_RANGE, quire.CapacityExceededError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, quire.LimitExceededError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, quire.DeadlineExceededError),
        (grpc.StatusCode.CANCELLED, quire.RequestCancelledError),
        (grpc.StatusCode.UNAVAILABLE, quire.UnavailableError),
        (grpc.StatusCode.FAILED_PRECONDITION, quire.OtherModelError),
        (grpc.StatusCode.INTERNAL, quire.InternalError),
        (grpc.StatusCode.UNAUTHENTICATED, quire.UnauthenticatedError),
        (grpc.StatusCode.PERMISSION_DENIED, quire.PermissionDeniedError),
        (grpc.StatusCode.DATA_LOSS, quire.InternalError),
    ],
)
def test_each_status_has_its_exception(
    server: ScriptedServer, kind: type[SyncCalls], code: grpc.StatusCode, error: type[quire.QuireError]
) -> None:
    server.script = refusal(code, "because")
    with pytest.raises(quire.QuireError) as raised:
        kind(server.address).events("p")
    assert type(raised.value) is error
    assert raised.value.code == code.name
    assert "because" in raised.value.message


@KINDS
def test_violations_and_retry_delay_reach_the_caller(server: ScriptedServer, kind: type[SyncCalls]) -> None:
    violations = {"sampling.temperature": "must not be negative", "stopping.stop": "is too long"}
    server.script = refusal(grpc.StatusCode.INVALID_ARGUMENT, "bad request", violations)
    with pytest.raises(quire.InvalidRequestError) as invalid:
        kind(server.address).call("complete", "p", temperature=-1.0)
    assert invalid.value.violations == violations
    assert "sampling.temperature: must not be negative" in str(invalid.value)

    server.script = refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue full", retry_after_s=1.5)
    with pytest.raises(quire.QueueFullError) as full:
        kind(server.address).events("p")
    assert full.value.retry_after_s == 1.5


@KINDS
def test_deadlines_go_to_the_server_and_expire(server: ScriptedServer, kind: type[SyncCalls]) -> None:
    server.script = endless
    with pytest.raises(quire.DeadlineExceededError):
        kind(server.address).events("p", timeout_s=0.3)
    with pytest.raises(quire.DeadlineExceededError):
        kind(server.address, timeout_s=0.3).call("complete", "p")
    assert len(server.time_remaining_s) == 2
    assert None not in server.time_remaining_s


@KINDS
def test_calls_have_no_deadline_by_default(server: ScriptedServer, kind: type[SyncCalls]) -> None:
    kind(server.address).events("p")
    assert server.time_remaining_s == [None]


@KINDS
def test_admin_calls(server: ScriptedServer, kind: type[SyncCalls]) -> None:
    server.block_map = admin_pb2.GetBlockMapResponse(
        block_size=4,
        blocks=[
            admin_pb2.BlockInfo(state=admin_pb2.BLOCK_STATE_FREE),
            admin_pb2.BlockInfo(state=admin_pb2.BLOCK_STATE_ACTIVE, ref_count=2, num_hits=1),
            admin_pb2.BlockInfo(state=admin_pb2.BLOCK_STATE_CACHED, num_hits=3, length=2),
        ],
        sequences=[
            admin_pb2.SequenceInfo(
                request_id="a",
                index=1,
                slot=2,
                num_tokens=5,
                num_computed_tokens=4,
                block_table=[1],
                num_prompt_tokens=3,
            )
        ],
        num_waiting=7,
        num_waiting_prompt_tokens=8,
        step_id=9,
        num_preemptions=10,
        num_cow_copies=11,
        num_running=1,
        summary=admin_pb2.PoolSummary(num_active_blocks=1, num_shared_blocks=1, num_used_slots=3, num_wasted_slots=1),
    )
    calls = kind(server.address)
    assert calls.call("block_map") == quire.BlockMap(
        block_size=4,
        blocks=(
            quire.Block(quire.BlockState.FREE, 0, 0),
            quire.Block(quire.BlockState.ACTIVE, 2, 1),
            quire.Block(quire.BlockState.CACHED, 0, 3),
            quire.Block(quire.BlockState.CACHED, 0, 3),
        ),
        sequences=(quire.RunningSequence("a", 1, 2, 5, 4, 3, (1,)),),
        num_waiting=7,
        num_waiting_prompt_tokens=8,
        step_id=9,
        num_preemptions=10,
        num_cow_copies=11,
        summary=quire.PoolSummary(0, 0, 1, 1, 3, 1, 1, 7, 10, 11),
    )
    assert calls.call("server_info") == quire.ServerInfo(
        version="1.2.3",
        model_name="toy",
        dtype="float32",
        max_model_len=256,
        vocab_size=100,
        block_size=16,
        num_blocks=63,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        policy="fcfs",
        state=quire.ServerState.SERVING,
    )
    calls.call("drain")
    assert server.num_drains == 1
    assert calls.call("reset_prefix_cache") == 5


def test_requests_of_one_client_run_concurrently(server: ScriptedServer) -> None:
    async def echo(request: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
        yield started(request.request_id)
        await until(lambda: len(server.requests) == 3)  # no request ends before all have begun
        yield delta(0, request.text, 1)
        yield finished(0)

    server.script = echo
    with quire.Client(server.address, timeout_s=20) as client:
        streams = [client.generate(text, request_id=text) for text in "abc"]
        texts = ["".join(event.text for event in stream if isinstance(event, quire.Delta)) for stream in streams]
    assert texts == ["a", "b", "c"]


@KINDS
def test_a_server_that_ignores_a_grammar_is_an_error(server: ScriptedServer, kind: type[SyncCalls]) -> None:
    follows = generation_pb2.Started(request_id="r", prompt_tokens=3, follows_grammar=True)
    end = finished(0, generation_pb2.FINISH_REASON_EOS, completion_tokens=1)
    server.script = replies(generation_pb2.GenerateResponse(started=follows), delta(0, "a", 7), end)
    assert kind(server.address).call("complete", "p", regex="a").text == "a"
    server.script = replies(started(), delta(0, "b", 8), end)
    assert kind(server.address).call("complete", "p").text == "b"
    with pytest.raises(quire.InternalError, match="ignores the grammar"):
        kind(server.address).call("complete", "p", regex="a")
