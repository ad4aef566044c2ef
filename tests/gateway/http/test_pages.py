"""Models, tokens, health, version and metrics."""

import asyncio
from datetime import datetime

import pytest

from quire.v1 import generation_pb2 as pb
from quire.version import build_version
from tests.support.gateway.fake_scheduler import MODEL, Answer, delta, finished, started
from tests.support.gateway.rig import CHAT, Rig, content


async def test_models() -> None:
    async with Rig() as rig:
        status, body = await rig.get("/v1/models")
        one = await rig.get(f"/v1/models/{MODEL}")
    (card,) = body["data"]
    assert (status, body["object"]) == (200, "list")
    assert {key: card[key] for key in ("id", "object", "owned_by", "max_model_len")} == {
        "id": MODEL,
        "object": "model",
        "owned_by": "quire",
        "max_model_len": 512,
    }
    assert one == (200, card)
    assert (card["type"], card["display_name"]) == ("model", MODEL)
    assert datetime.fromisoformat(card["created_at"]).timestamp() == card["created"]
    assert (body["first_id"], body["last_id"], body["has_more"]) == (MODEL, MODEL, False)


async def test_tokenize_and_detokenize() -> None:
    async with Rig() as rig:
        status, body = await rig.post("/tokenize", {"prompt": "bcd"})
        assert (status, body) == (
            200,
            {"count": 4, "max_model_len": 512, "tokens": [1, 100, 101, 102], "token_strs": None},
        )
        _, body = await rig.post("/tokenize", {"prompt": "é", "add_special_tokens": False, "return_token_strs": True})
        assert body["token_strs"] == ["bytes:\\xc3", "bytes:\\xa9"]
        _, body = await rig.post("/tokenize", {"model": MODEL, "messages": CHAT["messages"]})
        assert body["tokens"] == [1, 106, 107]
        assert await rig.post("/detokenize", {"tokens": [100, 101]}) == (200, {"prompt": "bc"})
        status, info = await rig.get("/tokenizer_info")
        assert (status, info["bos_token"], info["chat_template"]) == (200, "<s>", "{{ messages }}")


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "nope": 1}, 400, "nope"),
        ("/tokenize", {"prompt": "a", "model": "x"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [9999]}, 400, "tokens[0]"),
    ],
)
async def test_wrong_bodies_about_tokens(path: str, body: object, status: int, param: str) -> None:
    async with Rig() as rig:
        answer = await rig.post(path, body)
    assert (answer[0], answer[1]["error"]["param"]) == (status, param)


async def test_health_follows_the_schedulers() -> None:
    async with Rig(2) as rig:
        assert await rig.get("/health") == (200, "ok\n")
        for fake in rig.fakes:
            fake.state = pb.SERVER_STATE_WAITING_FOR_EXECUTOR
        await asyncio.gather(*(scheduler.poll() for scheduler in rig.schedulers.all))
        assert (await rig.get("/health"))[0] == 503
        rig.fakes[1].state = pb.SERVER_STATE_SERVING
        await asyncio.gather(*(scheduler.poll() for scheduler in rig.schedulers.all))
        assert (await rig.get("/health"))[0] == 200


async def test_the_first_text_counts_if_it_arrives_with_the_end() -> None:
    async def at_once(request: pb.GenerateRequest) -> Answer:
        for message in (started(), delta(0, "a", 1), finished(0, 1)):
            yield message

    async with Rig() as rig:
        rig.fake.answer = at_once
        assert content(await rig.events("/v1/chat/completions", CHAT)) == "a"
        _, page = await rig.get("/metrics")
    assert "quire_gateway_time_to_first_token_seconds_count 1.0" in page.splitlines()


async def test_metrics_count_requests() -> None:
    async with Rig() as rig:
        await rig.chat()
        await rig.events("/v1/chat/completions", CHAT)
        await rig.chat(n="x")
        await rig.get("/nowhere")
        status, page = await rig.get("/metrics")
    assert status == 200
    for line in (
        f'quire_build_info{{service="gateway",version="{build_version()}"}} 1.0',
        'quire_gateway_requests_total{path="/v1/chat/completions",status="200"} 2.0',
        'quire_gateway_requests_total{path="/v1/chat/completions",status="400"} 1.0',
        'quire_gateway_requests_total{path="unknown",status="404"} 1.0',
        "quire_gateway_open_requests 0.0",
        "quire_gateway_resumptions_total 0.0",
        "quire_gateway_time_to_first_token_seconds_count 1.0",
        f'quire_gateway_scheduler_ready{{scheduler="{rig.fake.address}"}} 1.0',
        f'quire_gateway_scheduler_streams{{scheduler="{rig.fake.address}"}} 0.0',
        # A single scheduler is not asked for reports; the dashboards show zeros, not a panel without data.
        f'quire_gateway_scheduler_watched{{scheduler="{rig.fake.address}"}} 0.0',
        f'quire_gateway_known_blocks{{scheduler="{rig.fake.address}"}} 0.0',
        f'quire_gateway_prefix_events_total{{scheduler="{rig.fake.address}"}} 0.0',
        f'quire_gateway_prefix_resyncs_total{{scheduler="{rig.fake.address}"}} 0.0',
    ):
        assert line in page.splitlines()


async def test_the_first_failure_is_not_the_beginning_of_its_series() -> None:
    """Rates and increases of Prometheus would not see it."""
    async with Rig() as rig:
        _, page = await rig.get("/metrics")
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"):
        for status in ("500", "503"):
            assert f'quire_gateway_requests_total{{path="{path}",status="{status}"}} 0.0' in page
