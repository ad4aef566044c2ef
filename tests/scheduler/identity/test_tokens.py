"""Tests signed tokens: which are accepted, and that keys can change."""

import asyncio
import base64
import hashlib
import hmac
import json
import time
from pathlib import Path
from typing import Any

import pytest

jwt = pytest.importorskip("jwt", reason="the extra `jwt` is not installed")
rsa = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.rsa")
ec = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ec")
serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")

from scheduler.identity import token_keys  # noqa: E402
from scheduler.identity.identity import Role, Unauthenticated  # noqa: E402
from scheduler.identity.token_keys import TokenKeysError, UrlKeys, parse_keys  # noqa: E402
from scheduler.identity.tokens import TokenSettings, TokenVerifier  # noqa: E402

KEYS = {name: rsa.generate_private_key(public_exponent=65537, key_size=2048) for name in ("first", "second")}
EC_KEY = ec.generate_private_key(ec.SECP256R1())


def public_entry(name: str, **fields: Any) -> dict[str, Any]:
    entry = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(KEYS[name].public_key()))
    return entry | {"kid": name, "use": "sig"} | fields


def jwks(*entries: dict[str, Any]) -> str:
    return json.dumps({"keys": list(entries)})


def claims(**changes: Any) -> dict[str, Any]:
    default = {"iss": "https://issuer", "aud": "quire", "exp": time.time() + 600, "sub": "u1", "tenant": "t1"}
    merged = default | {"role": "generate"} | changes
    return {name: value for name, value in merged.items() if value is not None}


def token(name: str = "first", algorithm: str = "RS256", header: dict[str, Any] | None = None, **changes: Any) -> str:
    made: str = jwt.encode(claims(**changes), KEYS[name], algorithm, {"kid": name} | (header or {}))
    return made


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "jwks.json"
    ec_entry = json.loads(jwt.algorithms.ECAlgorithm.to_jwk(EC_KEY.public_key()))
    strict = public_entry("first") | {"kid": "strict", "alg": "PS256"}
    path.write_text(jwks(public_entry("first"), ec_entry | {"kid": "ec", "alg": "ES256"}, strict))
    return path


def settings(keys: Path | str, **changes: Any) -> TokenSettings:
    values: dict[str, Any] = {
        "keys": str(keys),
        "issuer": "https://issuer",
        "audience": "quire",
        "algorithms": ("RS256", "ES256"),
        "tenant_claim": "tenant",
        "role_claim": "role",
    }
    return TokenSettings(**values | changes)


async def test_a_token_names_tenant_role_and_subject(file: Path) -> None:
    verifier = TokenVerifier(settings(file))
    for _ in range(2):  # the second time from memory
        identity = await verifier.identify(token(role=["observe", "other", "generate"]))
        assert (identity.name, identity.tenant) == ("u1", "t1")
        assert identity.roles == {Role.OBSERVE, Role.GENERATE}
    made = jwt.encode(claims(), EC_KEY, "ES256", {"kid": "ec"})
    assert (await verifier.identify(made)).roles == {Role.GENERATE}


async def test_a_token_without_a_key_id_is_verified_with_the_key_that_has_none(tmp_path: Path) -> None:
    path = tmp_path / "jwks.json"
    without_id = public_entry("first")
    del without_id["kid"]
    path.write_text(jwks(without_id, public_entry("second")))
    verifier = TokenVerifier(settings(path))
    assert (await verifier.identify(jwt.encode(claims(), KEYS["first"], "RS256"))).name == "u1"
    assert (await verifier.identify(token("second"))).name == "u1"
    with pytest.raises(Unauthenticated):
        await verifier.identify(jwt.encode(claims(), KEYS["second"], "RS256"))


@pytest.mark.parametrize(
    ("subject", "name"),
    [
        ("auth0|5f7c", "auth0%7C5f7c"),
        ("ann@example.com", "ann@example.com"),
        ('a "b"\nadmin call', "a%20%22b%22%0Aadmin%20call"),
        ("\ud800", "%3F"),
        ("é" * 100, "%C3%A9" * 21 + "%C"),
        ("", "token"),
        (None, "token"),
    ],
)
async def test_subjects_of_any_characters_tell_callers_apart(subject: str | None, name: str, file: Path) -> None:
    identity = await TokenVerifier(settings(file)).identify(token(sub=subject))
    assert identity.name == name


@pytest.mark.parametrize("kid", [None, "shared"])
async def test_keys_with_one_id_or_none_hide_none_of_each_other(kid: str | None, tmp_path: Path) -> None:
    """An issuer that gives keys no ids has two of them while it changes them."""
    path, same = tmp_path / "jwks.json", {"kid": kid}
    ec_entry = json.loads(jwt.algorithms.ECAlgorithm.to_jwk(EC_KEY.public_key())) | same
    path.write_text(jwks(public_entry("first", kid=kid), ec_entry, public_entry("second", kid=kid, alg="PS256")))
    verifier = TokenVerifier(settings(path, algorithms=("RS256", "PS256", "ES256")))
    header = {} if kid is None else {"kid": kid}
    for key, algorithm in ((KEYS["first"], "RS256"), (EC_KEY, "ES256"), (KEYS["second"], "PS256")):
        assert (await verifier.identify(jwt.encode(claims(), key, algorithm, header))).name == "u1"
    for key, algorithm in ((KEYS["second"], "RS256"), (rsa.generate_private_key(65537, 2048), "RS256")):
        with pytest.raises(Unauthenticated, match="not valid"):
            await verifier.identify(jwt.encode(claims(), key, algorithm, header))
    with pytest.raises(Unauthenticated, match="ExpiredSignatureError"):
        await verifier.identify(jwt.encode(claims(exp=1), KEYS["first"], "RS256", header))


async def test_the_names_of_the_claims_can_be_chosen(file: Path) -> None:
    verifier = TokenVerifier(settings(file, tenant_claim="https://x/org", role_claim="groups"))
    identity = await verifier.identify(token(**{"https://x/org": "org-5", "groups": ["admin"]}))
    assert (identity.tenant, identity.roles) == ("org-5", {Role.ADMIN})


def forged(header: dict[str, Any], secret: bytes | None) -> str:
    """Returns a token without a signature, or with a MAC made with `secret`."""

    def part(value: bytes) -> str:
        return base64.urlsafe_b64encode(value).rstrip(b"=").decode()

    signed = f"{part(json.dumps(header).encode())}.{part(json.dumps(claims()).encode())}"
    return f"{signed}.{'' if secret is None else part(hmac.digest(secret, signed.encode(), hashlib.sha256))}"


def public_pem(name: str) -> bytes:
    pem: bytes = (
        KEYS[name]
        .public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return pem


@pytest.mark.parametrize(
    "make",
    [
        lambda: token(exp=time.time() - 600),
        lambda: token(exp=None),
        lambda: token(exp=10**400),
        lambda: token(iss="https://other"),
        lambda: token(iss=None),
        lambda: token(aud="other"),
        lambda: token(aud=None),
        lambda: token(nbf=time.time() + 600),
        lambda: token(tenant=None),
        lambda: token(tenant="a b"),
        lambda: token(tenant=["t1"]),
        lambda: token(role=None),
        lambda: token(role="root"),
        lambda: token(role={"generate": 1}),
        lambda: token(algorithm="RS512"),
        lambda: token("second"),
        lambda: token("second", header={"kid": "first"}),
        lambda: token(header={"kid": "ec"}),
        lambda: token(header={"kid": "strict"}),
        lambda: token()[:-4] + "AAAA",
        lambda: forged({"alg": "none", "kid": "first"}, None),
        lambda: forged({"alg": "HS256", "kid": "first"}, public_pem("first")),
        lambda: forged({"alg": "HS256", "kid": "first"}, b""),
        lambda: forged({"alg": "RS256", "kid": 5}, b""),
        lambda: "a.b.c",
        lambda: "",
        lambda: base64.urlsafe_b64encode(b"[" * 6000).decode() + ".e30.",
    ],
)
async def test_other_tokens_are_refused(make: Any, file: Path) -> None:
    made = make()
    with pytest.raises(Unauthenticated) as raised:
        await TokenVerifier(settings(file)).identify(made)
    assert not made or made not in str(raised.value)


async def test_a_verified_token_is_refused_when_it_expires(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verifier, made = TokenVerifier(settings(file)), token()
    await verifier.identify(made)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3600)
    monkeypatch.setattr("jwt.api_jwt.datetime", _Later)
    with pytest.raises(Unauthenticated):
        await verifier.identify(made)


class _Later:
    """Stands for `datetime.datetime` in PyJWT, an hour later."""

    @staticmethod
    def now(tz: Any = None) -> Any:
        from datetime import datetime, timedelta

        return datetime.now(tz) + timedelta(hours=1)


async def test_withdrawn_keys_and_new_keys_count_without_a_restart(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_keys, "_FILE_INTERVAL_S", 0.0)
    verifier, old, new = TokenVerifier(settings(file)), token(), token("second")
    await verifier.identify(old)
    file.write_text(jwks(public_entry("second")))  # noqa: ASYNC240
    await verifier.identify(new)
    with pytest.raises(Unauthenticated):
        await verifier.identify(old)


async def test_a_url_is_fetched_for_unknown_keys_but_not_for_each_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [jwks(public_entry("first")).encode()]
    num_fetches = 0

    def read(url: str) -> bytes:
        nonlocal num_fetches
        num_fetches += 1
        return answers[-1]

    monkeypatch.setattr(token_keys, "_read_url", read)
    verifier = TokenVerifier(settings("https://issuer/keys"))
    await asyncio.gather(*(verifier.identify(token()) for _ in range(5)))
    assert num_fetches == 1
    answers.append(jwks(public_entry("second")).encode())
    for _ in range(5):
        with pytest.raises(Unauthenticated, match="key is not known"):
            await verifier.identify(token("second"))
    assert num_fetches == 1, "the keys were fetched a moment ago"
    monkeypatch.setattr(token_keys, "MIN_AGE_S", 0.0)
    assert (await verifier.identify(token("second"))).tenant == "t1"
    assert num_fetches == 2


async def test_a_key_that_was_withdrawn_while_no_token_came_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [jwks(public_entry("first")).encode()]
    monkeypatch.setattr(token_keys, "_read_url", lambda url: answers[-1])
    verifier, known = TokenVerifier(settings("https://issuer/keys")), token()
    await verifier.identify(known)
    answers.append(jwks(public_entry("second")).encode())
    verifier._source._fetched_s -= token_keys.MAX_AGE_S + 1  # type: ignore[attr-defined]
    verifier._source._tried_s -= token_keys.MAX_AGE_S + 1  # type: ignore[attr-defined]
    for each in (token(), known):
        with pytest.raises(Unauthenticated, match="key is not known"):
            await verifier.identify(each)


async def test_keys_are_fetched_before_they_are_too_old_and_no_token_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    num_fetches = 0

    def read(url: str) -> bytes:
        nonlocal num_fetches
        num_fetches += 1
        return jwks(public_entry("first")).encode()

    monkeypatch.setattr(token_keys, "_read_url", read)
    source = UrlKeys("https://issuer/keys")
    await source.current()
    assert num_fetches == 1
    source._fetched_s = source._tried_s = time.monotonic() - token_keys.REFRESH_AGE_S - 1
    current = source.current()
    with pytest.raises(StopIteration):  # it does not wait
        current.send(None)
    assert source._fetching is not None
    await source._fetching
    assert num_fetches == 2


async def test_an_answer_that_breaks_off_is_a_failed_fetch() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert not await UrlKeys(url).refreshed()


async def test_the_old_keys_stay_when_a_fetch_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    source = UrlKeys("https://issuer/keys")
    monkeypatch.setattr(token_keys, "MIN_AGE_S", 0.0)
    monkeypatch.setattr(token_keys, "_read_url", lambda url: jwks(public_entry("first")).encode())
    assert set(await source.refreshed()) == {"first"}
    monkeypatch.setattr(token_keys, "_read_url", lambda url: b"<html>")
    assert set(await source.refreshed()) == {"first"}


async def test_a_redirect_is_not_followed_because_it_could_lead_away_from_https() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        body = jwks(public_entry("first")).encode()
        found = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        moved = b"HTTP/1.1 302 Found\r\nLocation: /keys\r\nContent-Length: 0\r\n\r\n"
        writer.write(moved if b"/moved" in request else found)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert set(await UrlKeys(f"{url}/keys").refreshed()) == {"first"}
        assert not await UrlKeys(f"{url}/moved").refreshed()


def test_only_public_signature_keys_count() -> None:
    oct_entry = {"kty": "oct", "k": "c2VjcmV0", "kid": "shared"}
    keys = parse_keys(jwks(oct_entry, public_entry("first"), public_entry("second", use="enc")).encode(), "x")
    assert set(keys) == {"first"}
    assert not parse_keys(jwks(oct_entry).encode(), "x")
    assert not parse_keys(jwks({"kty": "RSA", "kid": "x"}).encode(), "x")
    for bad in ("[]", "{", "{}"):
        with pytest.raises(TokenKeysError):
            parse_keys(bad.encode(), "x")
