"""Finds the identity of a caller from its `Authorization` header or from its certificate."""

from __future__ import annotations

import base64
import hmac
from typing import TYPE_CHECKING

from quire.watched_files import WatchedFiles
from scheduler.identity.identity import ANONYMOUS, Identity, Unauthenticated
from scheduler.identity.key_file import INDEX_BYTES, PREFIX, Keys, digest, read_keys

if TYPE_CHECKING:
    from collections.abc import Iterable

    from scheduler.identity.tokens import TokenVerifier

_INTERVAL_S = 0.25
"""The key file is looked at this often while calls arrive."""


class Verifier:
    """Knows the keys and the tokens. Used on the event loop's thread.

    With neither a key file nor tokens no identity is configured: headers are then not read.
    """

    def __init__(self, key_file: str | None = None, tokens: TokenVerifier | None = None) -> None:
        """Raises KeyFileError."""
        self._keys: WatchedFiles[Keys] | None = None
        if key_file is not None:
            self._keys = WatchedFiles([key_file], lambda: read_keys(key_file), _INTERVAL_S)
        self._tokens = tokens

    @property
    def is_configured(self) -> bool:
        return self._keys is not None or self._tokens is not None

    @property
    def stranger(self) -> Identity | None:
        """The identity of callers without credentials: anonymous if no identity is configured, otherwise none."""
        return None if self.is_configured else ANONYMOUS

    async def identify(self, authorization: str | None) -> Identity | None:
        """Returns the caller with this `Authorization` header; None without one. Raises Unauthenticated."""
        if authorization is None or not self.is_configured:
            return None
        secret = _secret(authorization)
        if secret.startswith(PREFIX):
            return self._by_key(secret)
        if self._tokens is None:
            raise Unauthenticated("the key is not known")
        return await self._tokens.identify(secret)

    def by_certificate(self, names: Iterable[str]) -> Identity | None:
        """Returns the identity of a client whose verified certificate has these names."""
        known = {} if self._keys is None else self._keys.get().by_certificate
        return next((known[name] for name in names if name in known), None)

    def _by_key(self, key: str) -> Identity:
        wanted = digest(key)
        if self._keys is not None and (found := self._keys.get().by_digest.get(wanted[:INDEX_BYTES])) is not None:
            known, identity = found
            if hmac.compare_digest(known, wanted):
                return identity
        raise Unauthenticated("the key is not known")


def _secret(authorization: str) -> str:
    """Returns the key or the token: that of Bearer, or the password of Basic, which browsers ask for."""
    if not authorization.isascii():  # aiohttp passes other bytes on as surrogates, which cannot be encoded
        raise Unauthenticated("the Authorization header must be ASCII")
    scheme, _, value = authorization.partition(" ")
    value = value.strip()
    if scheme.lower() == "bearer" and value:
        return value
    if scheme.lower() == "basic":
        try:
            _, colon, password = base64.b64decode(value, validate=True).decode().partition(":")
        except ValueError:
            password = colon = ""
        if colon and password:
            return password
    raise Unauthenticated("the Authorization header must be Bearer with a key, or Basic with a key as the password")
