"""The gateway passes on the keys of its clients. Schedulers decide about them."""

import asyncio
from typing import Any

import pytest

from gateway.http import pages
from tests.support.gateway.fake_scheduler import MODEL
from tests.support.gateway.rig import CHAT, Rig
from tests.support.waiting import until

KEY = "quire-secret"
AUTHORIZATION = f"Bearer {KEY}"


async def test_streams_carry_the_clients_credentials() -> None:
    async with Rig(key=KEY, own_key=KEY) as rig:
        status, _ = await rig.post("/v1/chat/completions", CHAT, Authorization=AUTHORIZATION)
        assert status == 200
        assert rig.fake.opened[0].authorization == AUTHORIZATION
        assert rig.fake.opened[0].client == "127.0.0.1"


async def test_a_client_without_a_key_never_uses_that_of_the_gateway() -> None:
    async with Rig(key=KEY, own_key=KEY) as rig:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            for path in ("/v1/models", f"/v1/models/{MODEL}", "/metrics"):
                async with rig.http.get(path, headers=headers) as response:
                    body = await response.json()
                    assert (response.status, body["error"]["code"]) == (401, "invalid_api_key"), path
                    assert response.headers["WWW-Authenticate"] == "Bearer"
            status, body = await rig.post("/v1/chat/completions", CHAT, **headers)
            assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        assert [opened.HasField("authorization") for opened in rig.fake.opened] == [True, True]
        assert rig.fake.opened[0].authorization == ""


async def test_probes_need_no_key() -> None:
    async with Rig(key=KEY, own_key=KEY) as rig:
        assert (await rig.get("/health"))[0] == 200
        assert (await rig.get("/healthz"))[0] == 200
        assert (await rig.get("/version"))[0] == 200
        assert (await rig.get("/metrics", Authorization=AUTHORIZATION))[0] == 200


async def test_metrics_are_for_known_callers_while_no_scheduler_answers() -> None:
    async with Rig(key=KEY, own_key=KEY) as rig:
        assert (await rig.get("/metrics", Authorization=AUTHORIZATION))[0] == 200
        await rig.fake.stop()
        for headers in ({}, {"Authorization": "Bearer other"}):
            assert (await rig.get("/metrics", **headers))[0] == 503
        assert (await rig.get("/metrics", Authorization=AUTHORIZATION))[0] == 200
        rig.fake.key = "another"
        await rig.fake.start()

        async def is_refused() -> bool:
            return (await rig.get("/metrics", Authorization=AUTHORIZATION))[0] == 401

        await until(is_refused, what="once the gateway has connected again")
        await rig.fake.stop()
        assert (await rig.get("/metrics", Authorization=AUTHORIZATION))[0] == 503, "it is forgotten"


async def test_metrics_do_not_wait_for_a_scheduler_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "METRICS_TIMEOUT_S", 0.1)
    async with Rig(key=KEY, own_key=KEY) as rig, asyncio.timeout(10):
        assert (await rig.get("/metrics", Authorization=AUTHORIZATION))[0] == 200
        rig.fake.is_hung = True
        assert (await rig.get("/metrics", Authorization=AUTHORIZATION))[0] == 200
        for headers in ({}, {"Authorization": "Bearer other"}):
            status, body = await rig.get("/metrics", **headers)
            assert (status, body["error"]["code"]) == (503, "service_unavailable")


@pytest.mark.parametrize("config", [{}, {"listen": "0.0.0.0:0", "allow_anonymous": True}])
async def test_metrics_without_identity_need_no_scheduler(config: dict[str, Any]) -> None:
    """On loopback, and where the operator has said that everyone may call, as in compose.yaml."""
    async with Rig(**{"scheduler": "127.0.0.1:9"} | config) as rig:
        assert (await rig.get("/metrics"))[0] == 200
        assert (await rig.get("/metrics", Authorization=AUTHORIZATION))[0] == 503


@pytest.mark.parametrize(
    ("own_key", "config"),
    [(KEY, {}), (None, {"scheduler": "unix:/nowhere"}), (None, {"listen": "0.0.0.0:0"})],
)
async def test_metrics_are_hidden_while_readers_may_need_an_identity(
    own_key: str | None, config: dict[str, str]
) -> None:
    async with Rig(own_key=own_key, **{"scheduler": "127.0.0.1:9"} | config) as rig:
        assert (await rig.get("/metrics"))[0] == 503


async def test_a_stranger_that_a_scheduler_has_refused_gets_no_metrics_when_it_is_gone() -> None:
    async with Rig(key=KEY) as rig:
        assert (await rig.get("/metrics"))[0] == 401
        await rig.fake.stop()
        assert (await rig.get("/metrics"))[0] == 503


async def test_headers_that_grpc_cannot_carry_are_refused() -> None:
    async with Rig() as rig:
        status, body = await rig.post("/v1/chat/completions", CHAT, Authorization="Bearer schlüssel")
    assert (status, body["error"]["code"]) == (401, "invalid_api_key")


async def test_trace_context_is_passed_on() -> None:
    async with Rig() as rig:
        trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        await rig.post("/v1/chat/completions", CHAT, traceparent=trace, tracestate="a=1")
    assert (rig.fake.opened[0].traceparent, rig.fake.opened[0].tracestate) == (trace, "a=1")


async def test_a_trace_state_of_several_headers_is_one_list() -> None:
    async with Rig() as rig:
        body = b'{"model": "tiny", "prompt": "hi"}'
        reader, writer = await asyncio.open_connection(*rig.server.address.split(":"))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
            b"tracestate: a=1\r\ntracestate: b=2\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        writer.close()
    assert rig.fake.opened[0].tracestate == "a=1,b=2"


@pytest.mark.parametrize(("length", "is_kept"), [(512, True), (513, False)])
async def test_a_trace_state_is_passed_on_whole_or_not_at_all(length: int, is_kept: bool) -> None:
    """Its beginning would tell another value of the last member."""
    state = "a=1,b=" + "x" * 250 + ",c="
    state += "x" * (length - len(state))
    async with Rig() as rig:
        await rig.post("/v1/chat/completions", CHAT, tracestate=state)
    assert rig.fake.opened[0].tracestate == (state if is_kept else "")


async def test_pages_of_other_sites_are_refused() -> None:
    async with Rig(allowed_hosts="Chat.example") as rig:
        own = rig.server.address
        for headers, status in (
            ({"Origin": f"http://{own}"}, 200),
            ({"Origin": "http://evil.example"}, 403),
            ({"Sec-Fetch-Site": "cross-site"}, 403),
            ({"Sec-Fetch-Site": "same-site"}, 403),
            ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "document"}, 403),  # a form, and not a link
            ({"Origin": "null"}, 403),
            ({"Sec-Fetch-Site": "same-origin", "Host": "evil.example:8000"}, 403),
            ({"Origin": "http://evil.example:8000", "Host": "evil.example:8000"}, 403),
            ({"Origin": "https://chat.example", "Host": "chat.example"}, 200),
            ({"Origin": "https://chat.example", "Host": "Chat.Example"}, 200),
            ({"Origin": "https://chat.example.", "Host": "chat.example."}, 200),
            ({"Host": "evil.example:8000"}, 200),  # not a browser
        ):
            assert (await rig.post("/v1/chat/completions", CHAT, **headers))[0] == status, headers
