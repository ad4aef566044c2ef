"""The public keys that sign tokens (JWKS, RFC 7517), from a file or from an https URL."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jwt

from quire.watched_files import WatchedFiles

if TYPE_CHECKING:
    from collections.abc import Mapping

log = logging.getLogger(__name__)

MAX_AGE_S = 300.0
"""Older keys of a URL are fetched again before a token is verified, so a withdrawn key counts no longer than this."""
REFRESH_AGE_S = 240.0
"""A token that comes when the keys are older than this starts a fetch, and does not wait for it."""
MIN_AGE_S = 10.0
"""A fetch starts at most this often, also if tokens have unknown key ids or the last fetch has failed."""
_TIMEOUT_S = 5.0  # of each read
_FETCH_S = 10.0
"""Longest time that tokens wait for a fetch."""
_MAX_BYTES = 2**20
_FILE_INTERVAL_S = 0.25


class TokenKeysError(ValueError):
    """The keys cannot be used. The message names the file or the URL."""


@dataclass(frozen=True, slots=True)
class TokenKey:
    """A public key. `algorithm` is the only one it may be used with; None: any that fits the kind of the key."""

    key: Any
    algorithm: str | None


TokenKeys = dict[str | None, list[TokenKey]]
"""Keys by their ids; those without an id have None. Several can have one id (RFC 7517, section 4.5)."""


class FileKeys:
    """Keys in a file, which is read again when it changes."""

    has_keys = True
    """Keys were read, at least once."""

    def __init__(self, path: str) -> None:
        """Raises TokenKeysError."""
        self._file = WatchedFiles([path], lambda: _keys_in_file(path), _FILE_INTERVAL_S)

    async def current(self) -> TokenKeys:
        """Returns the keys; the same object as long as they have not changed."""
        return self._file.get()

    async def refreshed(self) -> TokenKeys:
        return self._file.get()


class UrlKeys:
    """Keys at a URL, fetched in a thread when the first token arrives, and then again from time to time.

    Keys that are too old, because no token came for a while, are fetched before a token is verified with them. If a
    fetch fails, the keys of the last one stay in use, keep their age, and are soon fetched again. A set without usable
    keys is no failure: all keys were withdrawn.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._keys: TokenKeys = {}
        self._fetched_s = self._tried_s = float("-inf")  # beginning of the last success, end of the last attempt
        self._fetching: asyncio.Task[None] | None = None

    async def current(self) -> TokenKeys:
        """Returns the keys; the same object as long as they have not been fetched again."""
        age_s = time.monotonic() - self._fetched_s
        if age_s > REFRESH_AGE_S and self._may_fetch:
            fetching = self._fetch_soon()
            if age_s > MAX_AGE_S:
                await asyncio.shield(fetching)
        return self._keys

    async def refreshed(self) -> TokenKeys:
        """Returns the keys after looking for new ones, for a token whose key is not known."""
        if self._may_fetch:
            await asyncio.shield(self._fetch_soon())
        return self._keys

    @property
    def has_keys(self) -> bool:
        """True if a set of keys was fetched, at least once."""
        return self._fetched_s > float("-inf")

    @property
    def _may_fetch(self) -> bool:
        return self._fetching is not None or time.monotonic() - self._tried_s > MIN_AGE_S

    def _fetch_soon(self) -> asyncio.Task[None]:
        if self._fetching is None:
            self._fetching = asyncio.create_task(self._fetch(), name="token keys")
        return self._fetching

    async def _fetch(self) -> None:
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(_FETCH_S):
                text = await asyncio.to_thread(_read_url, self._url)
            keys = parse_keys(text, self._url)
        except (TokenKeysError, TimeoutError) as error:
            log.error("the keys fetched before stay in use: %s", str(error) or f"{self._url} takes too long")
        else:
            if not keys:
                log.warning("%s has no public signature keys: all tokens are refused", self._url)
            self._keys, self._fetched_s = keys, began_s
        finally:
            self._tried_s = time.monotonic()
            self._fetching = None


def parse_keys(text: bytes, source: str) -> TokenKeys:
    """Returns the public signature keys of a JWKS, which may be none. Raises TokenKeysError.

    Symmetric keys are left out: with such a key, a server that checks tokens could also make them. Entries that cannot
    be understood are left out, too (RFC 7517, section 5), so that the others come and go.
    """
    try:
        entries = json.loads(text)["keys"]
        if not all(isinstance(entry, dict) for entry in entries):
            raise TypeError
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise TokenKeysError(f"{source} is not a JWKS: {type(error).__name__}") from None
    keys: TokenKeys = {}
    for entry in filter(_is_public_signature_key, entries):
        try:
            key = _key(entry)
            keys.setdefault(entry.get("kid"), []).append(key)
        except (ValueError, TypeError, KeyError, AttributeError, NotImplementedError, jwt.PyJWTError) as error:
            log.warning("%s: a key cannot be used: %s", source, type(error).__name__)
    return keys


def _is_public_signature_key(entry: Mapping[str, Any]) -> bool:
    operations = entry.get("key_ops", ["verify"])
    is_for_signatures = entry.get("use", "sig") == "sig" and isinstance(operations, list) and "verify" in operations
    return is_for_signatures and entry.get("kty") in ("RSA", "EC", "OKP")


def _key(entry: Mapping[str, Any]) -> TokenKey:
    public = {name: value for name, value in entry.items() if name != "d"}  # "d" makes a private key
    return TokenKey(jwt.PyJWK(public).key, entry.get("alg"))


def _keys_in_file(path: str) -> TokenKeys:
    """Raises TokenKeysError, also if the file has no usable keys."""
    if keys := parse_keys(_read_file(path), path):
        return keys
    raise TokenKeysError(f"{path} has no public signature keys")


def _read_file(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise TokenKeysError(f"cannot read {path}: {error.strerror or error}") from None


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, which could lead away from https."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _read_url(url: str) -> bytes:
    try:
        with urllib.request.build_opener(_NoRedirects).open(url, timeout=_TIMEOUT_S) as response:
            text: bytes = response.read(_MAX_BYTES + 1)
    except (OSError, ValueError, HTTPException) as error:
        raise TokenKeysError(f"cannot fetch {url}: {error}") from None
    if len(text) > _MAX_BYTES:
        raise TokenKeysError(f"{url} is larger than {_MAX_BYTES} bytes")
    return text
