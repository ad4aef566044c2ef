"""The gateway in front of a scheduler's real servers, with an engine whose tokens the tests write."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer

from scheduler.identity.key_file import digest, revoke
from scheduler.requests.limits import RequestLimits
from scheduler.servers import tokenization_server
from scheduler.text.checkpoint import Checkpoint
from tests.support.gateway.rig import Rig, content, parsed_events
from tests.support.scheduler.callers import Callers
from tests.support.scheduler.fake_engine import FakeEngine
from tests.support.scheduler.servers import Served, Servers
from tests.support.waiting import until

BODY = {"prompt": "hello fox", "max_tokens": 3}


def rig_for(served: Served, **config: Any) -> Rig:
    return Rig(scheduler=served.server.address, **config)


def let_generate(path: str, key: str) -> None:
    """Gives a key the role `generate`, whether the file knows it or not."""
    entries = json.loads(Path(path).read_text())
    entries["keys"] = [each for each in entries["keys"] if each["sha256"] != digest(key).hex()]
    own = {"name": "the-gateway", "tenant": "gateway", "roles": ["generate"], "sha256": digest(key).hex()}
    Path(path).write_text(json.dumps(entries | {"keys": [*entries["keys"], own]}))


async def answered(served: Served, token_ids: list[int]) -> Any:
    """Writes the tokens of the next request, and returns what the engine has got."""
    submitted = (await served.engine.next_request()).start()
    submitted.emit(token_ids)
    submitted.finish()
    return submitted


async def test_text_and_usage(servers: Servers) -> None:
    served = await servers.start()
    async with rig_for(served) as rig:
        answering = asyncio.create_task(rig.post("/v1/completions", BODY))
        submitted = await answered(served, [60, 61, 62])
        status, body = await answering
        streaming = asyncio.create_task(rig.events("/v1/completions", BODY))
        await answered(served, [60, 61, 62])
        events = await streaming
    assert status == 200
    assert body["model"] == "tiny"
    assert content(events) == body["choices"][0]["text"] != ""
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 3
    assert body["usage"]["prompt_tokens"] == len(submitted.request.prompt_token_ids)
    await served.idle()


async def test_counted_tokens_are_those_of_the_prompt(servers: Servers) -> None:
    chat = {"system": "Be brief.", "messages": [{"role": "user", "content": "hello"}], "thinking": {"type": "disabled"}}
    served = await servers.start(limits=RequestLimits(template_arguments=frozenset({"enable_thinking"})))
    async with rig_for(served) as rig:
        status, counted = await rig.post("/v1/messages/count_tokens", chat)
        answering = asyncio.create_task(rig.post("/v1/messages", chat | {"max_tokens": 3}))
        submitted = await answered(served, [60])
        _, body = await answering
    assert (status, counted["input_tokens"]) == (200, len(submitted.request.prompt_token_ids))
    assert body["usage"]["input_tokens"] == counted["input_tokens"]


async def test_a_client_that_goes_away_cancels_its_request(servers: Servers) -> None:
    served = await servers.start()
    async with rig_for(served) as rig:
        answering = asyncio.create_task(rig.post("/v1/completions", BODY))
        submitted = (await served.engine.next_request()).start()
        submitted.emit([60])
        answering.cancel()
        await until(lambda: submitted.was_cancelled)
        await served.idle()


async def test_the_key_of_each_client_decides(servers: Servers, tmp_path: Path) -> None:
    callers = Callers(tmp_path)
    served = await servers.start(access=callers.access())
    async with rig_for(served, own_key=callers.keys["admin"]) as rig:
        for caller, status in (("none", 401), ("wrong", 401), ("observe", 403)):
            answer = await rig.post("/v1/completions", BODY, **callers.header(caller))
            assert answer[0] == status, caller
        for caller, status in (("none", 401), ("wrong", 401), ("observe", 200), ("generate", 200)):
            assert (await rig.get("/v1/models", **callers.header(caller)))[0] == status, caller
        answering = asyncio.create_task(rig.post("/v1/completions", BODY, **callers.header("generate")))
        submitted = await answered(served, [60])
        assert (await answering)[0] == 200
        assert submitted.request.tenant == "tenant-of-generate"  # not that of the gateway's own key


async def test_at_the_local_address_the_gateway_needs_no_key_and_its_clients_do(
    servers: Servers, tmp_path: Path
) -> None:
    callers, local = Callers(tmp_path), f"unix:{tmp_path / 'local.sock'}"
    served = await servers.start(access=callers.access(), local_listen=local)
    async with Rig(scheduler=local) as rig:
        assert await rig.schedulers.refuse_strangers()
        assert (await rig.get("/health"))[0] == 200
        for caller, status in (("none", 401), ("wrong", 401), ("observe", 403)):
            for path, body in (("/v1/completions", BODY), ("/tokenize", {"prompt": "hello fox"})):
                assert (await rig.post(path, body, **callers.header(caller)))[0] == status, (caller, path)
        for path in ("/v1/models", "/tokenizer_info", "/metrics"):
            assert (await rig.get(path))[0] == 401, path
            assert (await rig.get(path, **callers.header("observe")))[0] == 200, path
        answering = asyncio.create_task(rig.post("/v1/completions", BODY, **callers.header("generate")))
        submitted = await answered(served, [60])
        assert (await answering)[0] == 200
        assert submitted.request.tenant == "tenant-of-generate"


async def test_metrics_are_for_callers_that_a_scheduler_knows_also_before_it_has_a_model(
    servers: Servers, tmp_path: Path
) -> None:
    """A large model loads for minutes, and Prometheus would take each gateway for down."""
    callers = Callers(tmp_path)
    served = await servers.start(FakeEngine(None), access=callers.access())
    async with rig_for(served, own_key=callers.keys["admin"]) as rig:
        for caller, status in (("none", 401), ("wrong", 401), ("observe", 200), ("generate", 200)):
            assert (await rig.get("/metrics", **callers.header(caller)))[0] == status, caller


@pytest.mark.parametrize("own", ["none", "wrong", "observe"])
async def test_a_scheduler_that_refuses_the_gateway_is_not_ready_until_it_accepts_it(
    servers: Servers, tmp_path: Path, own: str, caplog: pytest.LogCaptureFixture
) -> None:
    callers = Callers(tmp_path)
    served = await servers.start(access=callers.access())
    key = callers.keys[own]
    async with rig_for(served, own_key=key) as rig:
        client = callers.header("generate")
        assert (await rig.get("/health"))[0] == 503, "before the first request"
        assert (await rig.get("/v1/models", **client))[0] == 200, "the client is known"
        assert (await rig.get("/health"))[0] == 503, "after an answer to a client"
        for _ in range(2):
            status, body = await rig.post("/v1/completions", BODY, **client)
            assert (status, body["error"]["code"]) == (503, "service_unavailable")
            assert "the gateway is not allowed" in body["error"]["message"]
        await rig.schedulers.all[0].poll()
        assert (await rig.get("/health"))[0] == 503
        (line,) = (record.getMessage() for record in caplog.records if "refuses this gateway" in record.message)
        assert "QUIRE_API_KEY" in line
        if key is not None:
            let_generate(callers.path, key)
            await until(lambda: rig.schedulers.is_ready)
            answering = asyncio.create_task(rig.post("/v1/completions", BODY, **client))
            await answered(served, [60])
            assert (await answering)[0] == 200


async def test_a_key_of_the_gateway_that_is_revoked(servers: Servers, tmp_path: Path) -> None:
    """Nothing tells a gateway so while its call is open: it asks."""
    callers = Callers(tmp_path)
    served = await servers.start(access=callers.access())
    async with rig_for(served, own_key=callers.keys["generate"]) as rig:
        answering = asyncio.create_task(rig.post("/v1/completions", BODY, **callers.header("admin")))
        await answered(served, [60])
        assert (await answering)[0] == 200
        revoke(callers.path, "the-generate")
        await until(lambda: not rig.schedulers.is_ready)


async def test_a_client_that_is_refused_leaves_its_scheduler_ready(servers: Servers, tmp_path: Path) -> None:
    callers = Callers(tmp_path)
    served = await servers.start(access=callers.access())
    async with rig_for(served, own_key=callers.keys["generate"]) as rig:
        for caller, status in (("none", 401), ("wrong", 401), ("observe", 403)):
            assert (await rig.post("/v1/completions", BODY, **callers.header(caller)))[0] == status
            assert (await rig.get("/health"))[0] == 200
            assert rig.schedulers.all[0].is_ready


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 100}, "n"),
        ({"max_tokens": 2**31, "min_tokens": 2**32 - 1}, "min_tokens"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop_token_ids": [1, 5000]}, "stop_token_ids[1]"),
        ({"logit_bias": {"5000": 1}}, "logit_bias[5000]"),
        ({"logit_bias": {"5": 1000}}, "logit_bias[5]"),
        ({"allowed_token_ids": [5000]}, "allowed_token_ids[0]"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"beam_width": 2, "top_p": 0.5}, "top_p"),
        ({"length_penalty": 1}, "length_penalty"),
        ({"prompt": [5000]}, "prompt[0]"),
        ({"cache_salt": "x" * 300}, "cache_salt"),
        ({"request_id": "x" * 300}, "request_id"),
    ],
)
async def test_what_the_scheduler_refuses_has_the_name_of_the_json_field(
    servers: Servers, fields: dict[str, Any], param: str
) -> None:
    served = await servers.start()
    async with rig_for(served) as rig:
        status, body = await rig.post("/v1/completions", BODY | fields)
    assert (status, body["error"]["type"], body["error"]["param"]) == (400, "invalid_request_error", param)


@pytest.mark.parametrize("opening", ["", "<think>\n"])
async def test_thoughts_of_a_template_that_opens_them_and_of_one_that_does_not(
    checkpoint: Checkpoint, byte_level: FastTokenizer, servers: Servers, opening: str
) -> None:
    template = "{% for m in messages %}{{ m.content }}</think>{% endfor %}" + opening
    config = checkpoint.directory / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": template}))
    served = await servers.start()
    async with rig_for(served) as rig:
        body = {"messages": [{"role": "user", "content": "hello <think>"}], "max_tokens": 50}
        answering = asyncio.create_task(rig.post("/v1/chat/completions", body))
        await answered(served, byte_level.encode("Hm.</think>Yes.", add_special_tokens=False).ids)
        status, answer = await answering
    assert status == 200, answer
    message = answer["choices"][0]["message"]
    expected = ("Hm.", "Yes.") if opening else (None, "Hm.</think>Yes.")
    assert (message.get("reasoning_content"), message["content"]) == expected


async def test_a_slow_reader_does_not_hold_up_others(servers: Servers) -> None:
    served = await servers.start()
    async with rig_for(served) as rig:
        body = BODY | {"max_tokens": 50_000, "stream": True}
        beginning = asyncio.create_task(rig.http.post("/v1/completions", json=body))
        submitted = (await served.engine.next_request()).start()
        slow = await beginning
        for _ in range(400):
            submitted.emit([60, 61, 62] * 20)
            await asyncio.sleep(0)
        answering = asyncio.create_task(rig.post("/v1/completions", BODY))
        await answered(served, [60])
        assert (await answering)[0] == 200
        submitted.finish()
        async with slow:
            events = parsed_events(await slow.text())
    assert events[-1] == "[DONE]"
    assert len(content(events)) > 10_000


async def test_names_of_too_many_tokens_are_a_bad_field(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a context that is too long: the same text without the names of its tokens is fine."""
    monkeypatch.setattr(tokenization_server, "MAX_TOKENS_WITH_BYTES", 1)
    async with rig_for(await servers.start()) as rig:
        status, body = await rig.post("/tokenize", {"prompt": "hello fox", "return_token_strs": True})
        assert (status, body["error"]["param"], body["error"]["code"]) == (400, "return_token_strs", None)
        assert (await rig.post("/tokenize", {"prompt": "hello fox"}))[0] == 200
