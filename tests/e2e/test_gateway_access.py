"""`quire serve` with keys, or with certificates, starts a gateway that needs no settings of its own."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from scheduler.identity.identity import Identity, Role
from scheduler.identity.key_file import add_key
from tests.support.certificates import Authority
from tests.support.e2e.stack import Stack
from tests.support.e2e.waiting import until
from tests.support.gateway.rig import content, parsed_events

if TYPE_CHECKING:
    from pathlib import Path

    from quire.tls import TlsFiles

BODY = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
WRONG = "qk_" + "x" * 43


def serving(**flags: Any) -> Stack:
    return Stack(gateway=True, gateway_listen="127.0.0.1:0", num_blocks=256, **flags)


def header(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


async def asked(http: aiohttp.ClientSession, method: str, path: str, key: str, body: Any = None) -> tuple[int, str]:
    async with http.request(method, path, json=body, headers=header(key)) as response:
        return response.status, await response.text()


async def is_healthy(http: aiohttp.ClientSession) -> bool:
    status, text = await asked(http, "GET", "/health", "")
    assert status in (200, 503), text
    return status == 200


@pytest.mark.timeout(600)
async def test_with_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = str(tmp_path / "keys.json")
    user = add_key(keys, Identity("user", "research", frozenset({Role.GENERATE})))
    watcher = add_key(keys, Identity("watcher", "research", frozenset({Role.OBSERVE})))
    monkeypatch.setenv("QUIRE_API_KEY", watcher)  # of a person: with it the gateway could not generate
    async with (
        serving(api_keys=keys, allow_anonymous=False) as stack,
        aiohttp.ClientSession(f"http://{stack.openai}") as http,
    ):
        await until(lambda: is_healthy(http), "the gateway has found its scheduler")
        for key, status in (("", 401), (WRONG, 401), (watcher, 403)):
            for path, body in (("/v1/completions", BODY), ("/tokenize", {"prompt": "Once"})):
                assert (await asked(http, "POST", path, key, body))[0] == status, (key, path)
        for key, status in (("", 401), (WRONG, 401), (watcher, 200), (user, 200)):
            assert (await asked(http, "GET", "/v1/models", key))[0] == status, key
        status, text = await asked(http, "POST", "/v1/completions", user, BODY | {"stream": True})
        assert (status, bool(content(parsed_events(text)))) == (200, True)
        assert (await asked(http, "POST", "/tokenize", user, {"prompt": "Once"}))[0] == 200
        assert await stack.stop() == 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("clients_need_certificates", [False, True])
async def test_with_certificates(clients_need_certificates: bool, tmp_path: Path) -> None:
    authority = Authority.create(tmp_path)
    files = authority.issue_for_loopback()
    flags = {"tls_certificate": files.certificate, "tls_key": files.key}
    if clients_need_certificates:
        flags["tls_client_ca"] = authority.ca
    async with serving(**flags) as stack:
        connector = aiohttp.TCPConnector(ssl=client_context(authority, authority.issue("client", "DNS:client")))
        async with aiohttp.ClientSession(f"https://{stack.openai}", connector=connector) as http:
            await until(lambda: is_healthy(http), "the gateway has found its scheduler")
            status, text = await asked(http, "POST", "/v1/completions", "", BODY | {"stream": True})
            assert (status, bool(content(parsed_events(text)))) == (200, True)
        stranger = aiohttp.TCPConnector(ssl=client_context(authority, None))
        async with aiohttp.ClientSession(f"https://{stack.openai}", connector=stranger) as http:
            if clients_need_certificates:
                with pytest.raises(aiohttp.ClientError):
                    await asked(http, "GET", "/v1/models", "")
            else:
                assert (await asked(http, "GET", "/v1/models", ""))[0] == 200
        async with aiohttp.ClientSession(f"http://{stack.openai}") as http:
            with pytest.raises(aiohttp.ClientError):
                await asked(http, "GET", "/health", "")
        assert await stack.stop() == 0


def client_context(authority: Authority, files: TlsFiles | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.ca)
    if files is not None:
        context.load_cert_chain(files.certificate, files.key)
    return context
