"""Requests with grammars through both gRPC methods: compiled, sent to the engine once, refused by name, and counted."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.v1 import generation_pb2 as pb
from scheduler.core import FinishReason
from scheduler.live.completions import read_fields as read_json
from scheduler.requests import open_grammars
from scheduler.telemetry.limits import NUM_LIMITED
from scheduler.text.checkpoint import Checkpoint
from scheduler.text.grammars import GrammarCompiler, GrammarLimits
from tests.support.scheduler.fake_engine import MODEL, FakeEngine
from tests.support.scheduler.generation_calls import collect, failure, text_request, violations
from tests.support.scheduler.grammar_rig import SLOW
from tests.support.scheduler.many_calls import many_call
from tests.support.scheduler.servers import Served, Servers

Code = grpc.StatusCode
SCHEMA = '{"type": "object"}'


@pytest.fixture
async def served(servers: Servers, checkpoint: Checkpoint) -> AsyncIterator[Served]:
    """A server whose executor follows grammars; a compilation may take 0.3 s."""
    compiler = GrammarCompiler(checkpoint.directory / "tokenizer.json", [1], GrammarLimits(max_s=0.3))
    return await servers.start(FakeEngine(replace(MODEL, has_grammars=True)), grammars=compiler)


def with_grammar(**kind: Any) -> pb.GenerateRequest:
    return text_request(structured_output=pb.StructuredOutput(**kind))


async def grammar_of(served: Served, request: pb.GenerateRequest) -> str:
    """Sends a request, and returns the grammar that the engine receives with it."""
    task = asyncio.create_task(collect(served.generation.Generate(request)))
    submitted = await served.engine.next_request()
    submitted.start().finish()
    await task
    return submitted.request.params.grammar


async def test_each_kind_reaches_the_engine_in_one_form(served: Served) -> None:
    schema = json.loads(await grammar_of(served, with_grammar(json_schema=SCHEMA)))
    assert schema["grammars"][0]["json_schema"]["type"] == "object"
    assert json.loads(await grammar_of(served, with_grammar(json_object=True))) == schema
    regex = json.loads(await grammar_of(served, with_grammar(regex="a+b")))
    assert regex["grammars"][0]["lark_grammar"] == "start: /a+b/"
    choices = pb.StructuredOutput.Choices(texts=["yes", "no"])
    choice = json.loads(await grammar_of(served, with_grammar(choice=choices)))
    assert choice == {"grammars": [{"lark_grammar": 'start: "yes" | "no"'}]}
    lark = json.loads(await grammar_of(served, with_grammar(lark='start: "x"')))
    assert lark == {"grammars": [{"lark_grammar": 'start: "x"'}]}
    assert await grammar_of(served, text_request()) == ""


async def test_many_streams_of_one_call_have_their_own_grammars(served: Served) -> None:
    async with many_call(served.generation) as call:
        for stream_id, regex in enumerate(("a", "(", "b")):
            await call.open(stream_id, with_grammar(regex=regex))
        submitted = [await served.engine.next_request() for _ in range(2)]
        texts = sorted(json.loads(each.request.params.grammar)["grammars"][0]["lark_grammar"] for each in submitted)
        assert texts == ["start: /a/", "start: /b/"]
        refused = await call.end_of(1)
        assert (refused.code, "unclosed group" in refused.message) == (Code.INVALID_ARGUMENT.value[0], True)
        for each in submitted:
            each.start().finish()
        await call.complete(0)
        await call.complete(2)


@pytest.mark.parametrize(
    ("kind", "path", "problem"),
    [
        ({"json_schema": '{"type": "strin"}'}, "json_schema", "Invalid type: strin"),
        ({"json_schema": "{"}, "json_schema", "line 1 column 1"),
        ({"json_schema": '{"$ref": "https://example.com/a"}'}, "json_schema", "does not fetch"),
        ({"json_schema": SLOW}, "json_schema", "takes more than 0.3 s"),
        ({"regex": "[a-"}, "regex", "unclosed character class"),
        ({"lark": "start: absent"}, "lark", "unknown name"),
        ({"json_object": False}, "json_object", "must be true"),
        ({"choice": pb.StructuredOutput.Choices()}, "choice.texts", "must have 1 to 1024"),
        ({"regex": "a" * (256 * 1024 + 1)}, "regex", "at most 262144 bytes"),
    ],
)
async def test_bad_grammars_are_refused_by_name(served: Served, kind: Any, path: str, problem: str) -> None:
    error = await failure(served, with_grammar(**kind))
    assert error.code() is Code.INVALID_ARGUMENT
    found = violations(error)
    assert list(found) == [f"structured_output.{path}"]
    assert problem in found[f"structured_output.{path}"]
    assert not served.engine.submitted
    assert await grammar_of(served, with_grammar(regex="next"))


async def test_grammars_are_refused_without_an_executor_that_follows_them(servers: Servers) -> None:
    served = await servers.start()
    error = await failure(served, with_grammar(regex="a"))
    assert error.code() is Code.INVALID_ARGUMENT
    assert violations(error) == {"structured_output": "the executor cannot follow grammars"}


async def test_a_grammar_that_is_too_expensive_to_follow_ends_its_request_only(served: Served) -> None:
    call = served.generation.Generate(with_grammar(regex="a+"))
    submitted = await served.engine.next_request()
    other = asyncio.create_task(collect(served.generation.Generate(text_request())))
    neighbour = await served.engine.next_request()
    submitted.start().emit([5])
    submitted.finish(FinishReason.GRAMMAR)
    with pytest.raises(grpc.aio.AioRpcError, match="cannot be followed") as caught:
        await collect(call)
    assert caught.value.code() is Code.INVALID_ARGUMENT
    assert "grpc-status-details-bin" not in dict(caught.value.trailing_metadata() or ())  # nothing says to come again
    neighbour.start().finish()
    assert (await other)[-1].finished.reason == pb.FINISH_REASON_LENGTH


async def test_a_resumed_request_has_its_grammar_again(served: Served) -> None:
    request = with_grammar(regex="[a-z ]+")
    request.resumable = True
    call = served.generation.Generate(request)
    first = await served.engine.next_request()
    first.start().emit([70, 71])
    started = (await call.read()).started
    call.cancel()
    request.resume.continuation.CopyFrom(started.continuation)
    request.resume.sequences.add(index=0, token_ids=[70, 71])
    task = asyncio.create_task(collect(served.generation.Generate(request)))
    second = await served.engine.next_request()
    assert second.request.params.grammar == first.request.params.grammar != ""
    assert list(second.request.outputs[0].token_ids) == [70, 71]
    assert second.request.params.max_total_tokens == first.request.params.max_total_tokens
    second.start().finish(FinishReason.EOS)
    assert (await task)[-1].finished.reason == pb.FINISH_REASON_EOS


async def test_open_grammars_are_bounded_and_given_back(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(await grammar_of(served, with_grammar(regex="a" * 1000)))
    monkeypatch.setattr(open_grammars, "MAX_TENANT_BYTES", 2 * size)
    requests = [with_grammar(regex=letter * 1000) for letter in "aabb"]
    calls = [served.generation.Generate(request) for request in requests]
    submitted = [await served.engine.next_request() for _ in calls]
    texts = {id(each.request.params.grammar) for each in submitted}
    assert len(texts) == 2  # equal grammars are one text
    assert served.intake._grammars.num_bytes == 2 * size
    error = await failure(served, with_grammar(regex="c" * 1000))
    assert (error.code(), "too many different grammars" in str(error.details())) == (Code.RESOURCE_EXHAUSTED, True)
    for call in calls:
        call.cancel()
    await served.idle()
    assert served.intake._grammars.num_bytes == 0
    assert not served.intake._grammars._texts
    assert await grammar_of(served, with_grammar(regex="c" * 1000))


async def test_grammars_are_counted_by_result(served: Served, servers: Servers) -> None:
    limited = NUM_LIMITED["grammar_time"]
    for regex in ("a", "a", "b"):
        await grammar_of(served, with_grammar(regex=regex))
    await failure(served, with_grammar(regex="("))
    await failure(served, with_grammar(json_schema=SLOW))
    await failure(served, with_grammar(json_schema=SLOW))
    assert servers.metrics.measurements.num_grammars == {"compiled": 2, "cached": 1, "refused": 3}
    samples = {
        sample.name: sample.value
        for family in text_string_to_metric_families(servers.metrics.render().decode())
        for sample in family.samples
        if sample.name == "quire_grammar_compile_seconds_count"
    }
    assert samples == {"quire_grammar_compile_seconds_count": 4}
    assert NUM_LIMITED["grammar_time"] == limited + 1


def test_json_requests_have_the_same_fields() -> None:
    def paths(output: Any) -> dict[str, Any]:
        fields = read_json({"text": "a", "structured_output": output})
        return {path: value for path, value in fields.values.items() if path.startswith("structured_output")}

    assert paths({"regex": "a"}) == {"structured_output": True, "structured_output.regex": "a"}
    assert paths({}) == {"structured_output": True}
    assert paths({"choice": {"texts": ["a"]}}) == {
        "structured_output": True,
        "structured_output.choice.texts": ["a"],
    }
    assert paths({"choice": {}})["structured_output.choice.texts"] == []
    for bad, path in (
        ("a", "structured_output"),
        ({"rgex": "a"}, "structured_output.rgex"),
        ({"choice": {"x": 1}}, "structured_output.choice.x"),
        ({"choice": ["a"]}, "structured_output.choice"),
    ):
        with pytest.raises(Exception, match=path):
            read_json({"text": "a", "structured_output": bad})
