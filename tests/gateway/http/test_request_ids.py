"""Every answer has an id, which also stands in the log if the request failed."""

import logging
from typing import Any

import grpc
import pytest

from tests.support.gateway.fake_scheduler import MODEL, Failure
from tests.support.gateway.rig import CHAT, Rig


@pytest.fixture(autouse=True)
def _unlimited_log(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Lets every failure of a test into the log, though the tests of one second fail more than the log takes."""
    if request.node.get_closest_marker("limited_log") is None:
        monkeypatch.setattr(logging.getLogger("gateway.http.server"), "filters", [])


def logged(caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    """Returns the fields of the only line about a request that failed, and forgets all lines."""
    (record,) = (each for each in caplog.records if hasattr(each, "request_id"))
    caplog.clear()
    return vars(record)


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/chat/completions", CHAT | {"temperature": "hot"}, 400),
        ("POST", "/v1/chat/completions", {}, 400),
        ("POST", "/v1/chat/completions", CHAT | {"model": "other"}, 404),
        ("POST", "/v1/messages", {"model": MODEL}, 400),
        ("POST", "/tokenize", {"model": "other", "prompt": "hi"}, 404),
        ("GET", "/v1/models/other", None, 404),
        ("GET", "/v1/completions", None, 405),
        ("GET", "/nowhere", None, 404),
    ],
)
async def test_a_refused_request_has_an_id(
    method: str, path: str, body: object, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with Rig() as rig, rig.http.request(method, path, json=body) as response:
        given = response.headers["X-Request-Id"]
        assert (response.status, response.headers["Request-Id"]) == (status, given)
    fields = logged(caplog)
    assert (fields["request_id"], fields["status"], fields["levelname"]) == (given, status, "INFO")
    assert fields["reason"] is None, "the message may quote the request"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_request_that_a_scheduler_fails_has_the_id_that_the_scheduler_knows(
    is_streamed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with Rig() as rig:

        async def answer(request: object) -> Any:
            raise Failure(grpc.StatusCode.INTERNAL, "a reason")
            yield

        rig.fake.answer = answer
        async with rig.http.post("/v1/chat/completions", json=CHAT | {"stream": is_streamed}) as response:
            given = response.headers["X-Request-Id"]
            assert response.status == 500
        (seen,) = rig.fake.requests
    assert seen.request_id == given
    assert given.startswith("chatcmpl-")
    fields = logged(caplog)
    assert (fields["request_id"], fields["levelname"], fields["reason"]) == (given, "WARNING", "a reason")


async def test_a_bug_has_an_id(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("secret")

    async with Rig() as rig:
        monkeypatch.setattr(rig.schedulers, "open", broken)
        async with rig.http.post("/v1/chat/completions", json=CHAT) as response:
            given = response.headers["X-Request-Id"]
            assert response.status == 500
    assert logged(caplog)["request_id"] == given


async def test_every_answer_has_another_id(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    paths = ("/v1/models", "/version", "/health", "/healthz", "/metrics", "/", "/v1/models")
    given = []
    async with Rig() as rig:
        for path in paths:
            async with rig.http.get(path) as response:
                assert response.status == 200
                given.append(response.headers["X-Request-Id"])
    assert len(set(given)) == len(paths)
    assert not [each for each in caplog.records if hasattr(each, "request_id")]


@pytest.mark.limited_log
async def test_refused_requests_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with Rig() as rig:
        for _ in range(50):
            await rig.get("/nowhere")
    assert len([each for each in caplog.records if hasattr(each, "request_id")]) < 50
