"""Tests how long keys of a URL count, by a clock of the test."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("jwt", reason="the extra `jwt` is not installed")
pytest.importorskip("cryptography")

from scheduler.identity import token_keys
from scheduler.identity.token_keys import FileKeys, TokenKeysError, UrlKeys
from tests.scheduler.identity.test_tokens import jwks, public_entry

FIRST, SECOND, NONE = (text.encode() for text in (jwks(public_entry("first")), jwks(public_entry("second")), jwks()))


class Url:
    """Answers with `text`, or fails if it is None; `now_s` is the time."""

    def __init__(self) -> None:
        self.text: bytes | None = FIRST
        self.now_s = 1000.0
        self.num_fetches = 0

    def read(self, url: str) -> bytes:
        self.num_fetches += 1
        if self.text is None:
            raise TokenKeysError(f"cannot fetch {url}")
        return self.text


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Url:
    made = Url()
    monkeypatch.setattr(token_keys, "_read_url", made.read)
    monkeypatch.setattr(token_keys, "time", SimpleNamespace(monotonic=lambda: made.now_s))
    return made


async def seconds_until(condition: Callable[[set[str | None]], bool], source: UrlKeys, url: Url) -> int:
    """Asks for the keys once a second, as tokens do; returns the first second in which they meet the condition."""
    for second in range(1, 1000):
        url.now_s += 1
        if condition(set(await source.current())):
            return second
        if source._fetching is not None:
            await source._fetching
    raise AssertionError("1000 seconds were not enough")


@pytest.mark.parametrize("text", [SECOND, NONE], ids=["another key", "no key"])
async def test_a_withdrawn_key_does_not_count_longer_than_five_minutes(text: bytes, url: Url) -> None:
    source = UrlKeys("https://issuer/keys")
    assert set(await source.current()) == {"first"}
    url.text = text
    assert await seconds_until(lambda keys: "first" not in keys, source, url) <= token_keys.MAX_AGE_S


async def test_a_failed_fetch_does_not_make_the_keys_younger(url: Url) -> None:
    source = UrlKeys("https://issuer/keys")
    await source.current()
    url.text = None
    await seconds_until(lambda _: url.num_fetches == 2, source, url)
    url.text = SECOND
    assert await seconds_until(lambda keys: keys == {"second"}, source, url) <= token_keys.MIN_AGE_S + 2


async def test_keys_stay_while_the_url_fails_and_it_is_not_asked_for_each_token(url: Url) -> None:
    source = UrlKeys("https://issuer/keys")
    await source.current()
    url.text = None
    url.now_s += token_keys.MAX_AGE_S + 1
    for _ in range(5):
        assert set(await source.current()) == set(await source.refreshed()) == {"first"}
    assert url.num_fetches == 2
    url.now_s += token_keys.MIN_AGE_S + 1
    url.text = SECOND
    assert set(await source.current()) == {"second"}


UNUSABLE = [
    {"kid": "encrypts", "kty": "RSA", "alg": "RSA-OAEP-256", "n": "AQAB", "e": "AQAB"},
    {"kid": "curve", "kty": "EC", "crv": "P-000", "x": "AA", "y": "AA"},
    {"kid": "X25519", "kty": "OKP", "crv": "X25519", "x": "AA"},
    {"kid": "no kind"},
    {"kid": "none", "kty": "RSA", "alg": "none", "n": "AQAB", "e": "AQAB"},
    {"kid": "list", "kty": ["RSA"], "use": {}},
    {**public_entry("first"), "kid": "signs", "key_ops": ["sign"]},
]


@pytest.mark.parametrize("entry", UNUSABLE, ids=lambda entry: entry["kid"])
def test_an_entry_that_cannot_be_used_is_left_out_and_hides_no_other(entry: dict[str, Any]) -> None:
    assert set(token_keys.parse_keys(jwks(entry, public_entry("second")).encode(), "a set")) == {"second"}


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"keys": 7}', b'{"keys": [7]}', b'{"keys": null}'])
def test_what_is_no_set_of_keys_is_refused(text: bytes) -> None:
    with pytest.raises(TokenKeysError, match="is not a JWKS"):
        token_keys.parse_keys(text, "a set")


def test_a_file_without_keys_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "jwks.json"
    path.write_bytes(NONE)
    with pytest.raises(TokenKeysError, match="no public signature keys"):
        FileKeys(str(path))
