"""Each failure has the status and the body that OpenAI's clients expect."""

from typing import Any

import grpc
import pytest

from quire.v1 import generation_pb2 as pb
from tests.support.gateway.fake_scheduler import MODEL, Answer, Failure, delta, started
from tests.support.gateway.rig import CHAT, Rig, parsed_events

Code = grpc.StatusCode


def failing(failure: Failure, *before: pb.GenerateResponse) -> Any:
    async def answer(request: pb.GenerateRequest) -> Answer:
        for message in before:
            yield message
        raise failure

    return answer


@pytest.mark.parametrize(
    ("failure", "status", "kind", "code"),
    [
        (Failure(Code.INVALID_ARGUMENT, "bad"), 400, "invalid_request_error", None),
        (Failure(Code.OUT_OF_RANGE, "too long"), 400, "invalid_request_error", "context_length_exceeded"),
        (Failure(Code.RESOURCE_EXHAUSTED, "full", retry_after_s=2.5), 429, "rate_limit_error", "rate_limit_exceeded"),
        (Failure(Code.RESOURCE_EXHAUSTED, "too big"), 413, "invalid_request_error", None),
        (Failure(Code.UNAUTHENTICATED, "no key"), 401, "invalid_request_error", "invalid_api_key"),
        (Failure(Code.PERMISSION_DENIED, "no"), 403, "permission_error", "permission_denied"),
        (Failure(Code.UNAVAILABLE, "draining"), 503, "service_unavailable_error", "service_unavailable"),
        (Failure(Code.DEADLINE_EXCEEDED, "late"), 504, "timeout_error", "timeout"),
        (Failure(Code.INTERNAL, "bug"), 500, "server_error", "internal_error"),
        (Failure(Code.FAILED_PRECONDITION, "other model"), 503, "service_unavailable_error", "service_unavailable"),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_statuses(failure: Failure, status: int, kind: str, code: str | None, is_streamed: bool) -> None:
    """A stream that fails before its first message has no event: its status says what happened."""
    async with Rig(resume_timeout_s=0.1) as rig:
        rig.fake.answer = failing(failure)
        async with rig.http.post("/v1/chat/completions", json=CHAT | {"stream": is_streamed}) as response:
            body = await response.json()
            retry_after = response.headers.get("Retry-After")
    assert response.status == status
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert (body["error"]["type"], body["error"]["code"]) == (kind, code)
    assert str(failure) in body["error"]["message"]
    assert retry_after == {429: "3", 503: "1"}.get(status)


@pytest.mark.parametrize(
    ("path", "field", "endpoint"),
    [
        ("sampling.temperature", "temperature", "chat"),
        ("sampling.logit_bias[7]", "logit_bias[7]", "chat"),
        ("stopping.stop[1]", "stop[1]", "chat"),
        ("stopping.include_stop", "include_stop_str_in_output", "chat"),
        ("stopping.max_tokens", "max_tokens", "chat"),
        ("output.logprobs", "top_logprobs", "chat"),
        ("chat.messages[2].content", "messages[2].content", "chat"),
        ("chat", "messages", "chat"),
        ("prompt", "messages", "chat"),
        ("chat.tools[0]", "tools[0]", "chat"),
        ("chat.template_arguments[x]", "chat_template_kwargs[x]", "chat"),
        ("output.logprobs", "logprobs", "completions"),
        ("token_ids.ids[3]", "prompt[3]", "completions"),
        ("text", "prompt", "completions"),
        ("prompt", "prompt", "completions"),
        ("cache_salt", "cache_salt", "completions"),
        ("sampling.beam_width", "beam_width", "completions"),
        ("something.new", "something.new", "completions"),
    ],
)
async def test_violations_have_the_names_of_json_fields(path: str, field: str, endpoint: str) -> None:
    async with Rig() as rig:
        rig.fake.answer = failing(Failure(Code.INVALID_ARGUMENT, "bad", violations={path: "must be else"}))
        status, body = await (rig.chat() if endpoint == "chat" else rig.complete())
    assert status == 400
    assert body["error"]["param"] == field
    assert body["error"]["message"] == f"{field}: must be else"


async def test_the_name_is_that_of_the_field_that_was_sent() -> None:
    async with Rig() as rig:
        rig.fake.answer = failing(Failure(Code.INVALID_ARGUMENT, "bad", violations={"stopping.max_tokens": "is bad"}))
        _, body = await rig.chat(max_completion_tokens=0)
    assert body["error"]["param"] == "max_completion_tokens"


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"best_of": 5000000, "n": 2}, "best_of"), ({"best_of": 5000000, "n": 5000000}, "n"), ({}, "n")],
)
async def test_too_many_sequences_are_those_of_the_field_that_asked_for_them(
    fields: dict[str, Any], param: str
) -> None:
    async with Rig() as rig:
        rig.fake.answer = failing(Failure(Code.INVALID_ARGUMENT, "bad", violations={"sampling.n": "is too large"}))
        _, body = await rig.complete(**fields)
    assert body["error"]["param"] == param


async def test_an_error_after_the_beginning_is_the_last_event(caplog: pytest.LogCaptureFixture) -> None:
    async with Rig() as rig:
        rig.fake.answer = failing(Failure(Code.INTERNAL, "bug"), started(), delta(0, "a", 1))
        async with rig.http.post("/v1/chat/completions", json=CHAT | {"stream": True}) as response:
            assert response.status == 200
            events = parsed_events(await response.text())
        _, page = await rig.get("/metrics")
    assert events[-1]["error"]["code"] == "internal_error"
    assert "[DONE]" not in events
    assert events[-2]["choices"][0]["delta"] == {"content": "a"}
    # The status of the answer is 200: nothing else tells an operator.
    assert 'quire_gateway_stream_failures_total{status="500"} 1.0' in page.splitlines()
    (line,) = (each for each in caplog.records if each.name == "gateway.http.generation")
    assert line.getMessage().endswith("status 500: bug")


async def test_an_error_before_the_beginning_and_a_good_stream_are_no_failed_streams() -> None:
    async with Rig() as rig:
        await rig.events("/v1/chat/completions", CHAT)
        rig.fake.answer = failing(Failure(Code.INTERNAL, "bug"))
        assert (await rig.chat(stream=True))[0] == 500
        _, page = await rig.get("/metrics")
    assert 'quire_gateway_stream_failures_total{status="500"} 0.0' in page.splitlines()


async def test_unknown_paths_methods_and_models() -> None:
    async with Rig() as rig:
        status, body = await rig.get("/v1/engines")
        assert (status, body["error"]["type"]) == (404, "invalid_request_error")
        status, body = await rig.get("/v1/completions")
        assert (status, body["error"]["param"]) == (405, None)
        status, body = await rig.chat(model="gpt-5")
        assert (status, body["error"]["code"], body["error"]["param"]) == (404, "model_not_found", "model")
        assert "gpt-5" in body["error"]["message"]
        status, body = await rig.get("/v1/models/gpt-5")
        assert (status, body["error"]["code"]) == (404, "model_not_found")
        assert not rig.fake.opened


async def test_a_method_that_a_path_lacks_is_answered_with_those_that_it_has() -> None:
    async with Rig() as rig:
        for method, path, allowed in (
            ("GET", "/v1/completions", "POST"),
            ("PUT", "/v1/models", "GET,HEAD"),
            ("GET", "/v1/messages", "POST"),
        ):
            async with rig.http.request(method, path) as response:
                assert (response.status, response.headers["Allow"]) == (405, allowed)
                body = await response.json()
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error"), "Anthropic's form"
        await rig.get("/v1/models2")
        _, page = await rig.get("/metrics")
    for path, status in (("/v1/completions", 405), ("/v1/messages", 405), ("unknown", 404)):
        assert f'quire_gateway_requests_total{{path="{path}",status="{status}"}} 1.0' in page


async def test_the_served_names_can_be_others() -> None:
    async with Rig(served_model_name="a,org/b") as rig:
        assert (await rig.chat(model=MODEL))[0] == 404
        assert (await rig.chat(model="org/b"))[1]["model"] == "org/b"
        assert (await rig.chat(model=None))[1]["model"] == "a"
        _, models = await rig.get("/v1/models")
        assert [card["id"] for card in models["data"]] == ["a", "org/b"]
        status, card = await rig.get("/v1/models/org/b")
        assert (status, card["max_model_len"]) == (200, 512)


async def test_no_scheduler_is_a_503_at_once() -> None:
    async with Rig(scheduler="127.0.0.1:9") as rig:
        status, body = await rig.chat()
        assert (status, body["error"]["code"]) == (503, "service_unavailable")
        assert (await rig.get("/health"))[0] == 503
        assert (await rig.get("/healthz"))[0] == 200


@pytest.mark.parametrize("names", ["", MODEL], ids=["a call that prepares the request", "its stream"])
async def test_an_error_does_not_name_the_address_of_a_scheduler(names: str) -> None:
    async with Rig(scheduler="127.0.0.1:9", served_model_name=names) as rig:
        status, body = await rig.post("/v1/completions", {"model": MODEL, "prompt": "hi"})
    assert (status, body["error"]["message"]) == (503, "the scheduler cannot be reached")


async def test_a_bug_shows_no_details(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("secret")

    async with Rig() as rig:
        monkeypatch.setattr(rig.schedulers, "open", broken)
        status, body = await rig.chat()
    assert (status, body["error"]["type"]) == (500, "server_error")
    assert "secret" not in body["error"]["message"]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_answer_that_ignores_the_grammar_is_an_error(is_streamed: bool) -> None:
    async with Rig() as rig:
        rig.fake.knows_grammars = False
        body = CHAT | {"response_format": {"type": "json_object"}, "stream": is_streamed}
        status, text = await rig.post("/v1/chat/completions", body)
        ordinary, _ = await rig.post("/v1/chat/completions", CHAT)
    assert status == 500
    assert "too old for structured output" in str(text)
    assert ordinary == 200
