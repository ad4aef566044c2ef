"""Valid tokens are not refused for good while the keys that sign them cannot be fetched."""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp
import grpc
import pytest

pytest.importorskip("jwt", reason="the extra `jwt` is not installed")
pytest.importorskip("cryptography")

from quire.v1 import generation_pb2 as pb
from quire.v1.generation_pb2_grpc import GenerationStub
from scheduler.identity import token_keys
from scheduler.identity.token_keys import TokenKeysError
from scheduler.identity.tokens import TokenVerifier
from scheduler.identity.verifier import Verifier
from scheduler.servers.access import Access, ClientRefused
from scheduler.servers.refusals import Refusals
from tests.scheduler.identity.test_tokens import jwks, public_entry, settings, token
from tests.support.live.serving import serve_page

if TYPE_CHECKING:
    from scheduler.text.checkpoint import Checkpoint
    from tests.support.scheduler.servers import Servers


class Issuer:
    """The keys at its URL; None: the URL cannot be reached."""

    keys: bytes | None = None

    def read(self, url: str) -> bytes:
        if self.keys is None:
            raise TokenKeysError(f"cannot fetch {url}")
        return self.keys


@pytest.fixture
def issuer(monkeypatch: pytest.MonkeyPatch) -> Issuer:
    made = Issuer()
    monkeypatch.setattr(token_keys, "_read_url", made.read)
    monkeypatch.setattr(token_keys, "MIN_AGE_S", 0.0)
    return made


@pytest.fixture
def counted() -> list[str]:
    return []


@pytest.fixture
def access(issuer: Issuer, counted: list[str]) -> Access:
    tokens = TokenVerifier(settings("https://issuer/keys"))
    return Access(Verifier(tokens=tokens), Refusals(counted.append))


async def test_a_call_is_unavailable_until_keys_are_fetched(
    access: Access, issuer: Issuer, counted: list[str], servers: Servers
) -> None:
    served = await servers.start(access=access)
    info = GenerationStub(served.channel).GetServerInfo

    async def status(text: str) -> grpc.StatusCode:
        try:
            await info(pb.GetServerInfoRequest(), metadata=[("authorization", f"Bearer {text}")], timeout=30)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    assert await status(token()) is grpc.StatusCode.UNAVAILABLE
    assert await status("no token") is grpc.StatusCode.UNAUTHENTICATED
    assert counted == ["unavailable", "unauthenticated"]
    issuer.keys = jwks(public_entry("second")).encode()
    assert await status(token()) is grpc.StatusCode.UNAUTHENTICATED
    issuer.keys = jwks(public_entry("first")).encode()
    assert await status(token()) is grpc.StatusCode.OK
    issuer.keys = None
    assert await status(token()) is grpc.StatusCode.OK


async def test_a_page_is_unavailable_until_keys_are_fetched(access: Access, checkpoint: Checkpoint) -> None:
    header = {"Authorization": f"Bearer {token()}"}
    async with (
        serve_page(checkpoint, access) as served,
        aiohttp.ClientSession() as session,
        session.get(served.url + "/metrics", headers=header) as response,
    ):
        assert (response.status, response.headers["Retry-After"]) == (503, "1")
        assert "could not be fetched yet" in (await response.json())["error"]["message"]


async def test_the_client_of_a_gateway_is_told_that_it_can_try_again(access: Access) -> None:
    with pytest.raises(ClientRefused) as refused:
        await access.client(f"Bearer {token()}")
    assert refused.value.code is grpc.StatusCode.UNAVAILABLE
