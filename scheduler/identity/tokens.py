"""Verifies signed tokens (JWT, RFC 7519). Needs the extra `jwt`.

The algorithm is one of the operator's list, which can hold asymmetric ones only: neither "none" nor a MAC made with
the public key passes. `exp`, `iss` and `aud` must be there and right.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import jwt

from scheduler.identity.identity import UNAVAILABLE, Identity, Role, Unauthenticated, is_name
from scheduler.identity.token_keys import FileKeys, UrlKeys

if TYPE_CHECKING:
    from collections.abc import Collection

    from scheduler.identity.token_keys import TokenKey, TokenKeys

_LEEWAY_S = 30.0
"""Difference that the clocks of the issuer and the scheduler may have."""
_MAX_CACHED = 4096
_MAX_NAME = 128


@dataclass(frozen=True, slots=True)
class TokenSettings:
    """The properties that a token must have.

    keys           path or https URL of a JWKS
    issuer         value of `iss`
    audience       one of the values of `aud`
    algorithms     allowed values of `alg`
    tenant_claim   name of the claim with the tenant
    role_claim     name of the claim with the role, or a list of roles; other values in it are ignored
    """

    keys: str
    issuer: str
    audience: str
    algorithms: tuple[str, ...]
    tenant_claim: str
    role_claim: str


class TokenVerifier:
    """Verifies tokens, and remembers those that are valid."""

    def __init__(self, settings: TokenSettings) -> None:
        """Raises TokenKeysError."""
        self._settings = settings
        is_url = settings.keys.startswith(("https://", "http://"))
        self._source: UrlKeys | FileKeys = UrlKeys(settings.keys) if is_url else FileKeys(settings.keys)
        self._keys: TokenKeys = {}
        self._verified: dict[bytes, tuple[Identity, float]] = {}

    async def identify(self, token: str) -> Identity:
        """Returns the identity in the token. Raises Unauthenticated."""
        digest = hashlib.sha256(token.encode()).digest()
        self._use(await self._source.current())
        if (known := self._verified.get(digest)) is not None and time.time() < known[1]:
            return known[0]
        try:
            header = jwt.get_unverified_header(token)
            keys = self._find(header)
            if not keys:
                self._use(await self._source.refreshed())
                keys = self._find(header)
            if not keys and not self._source.has_keys:
                raise Unauthenticated("the keys that sign tokens could not be fetched yet", UNAVAILABLE)
            if not keys:
                raise Unauthenticated("the token's key is not known")
            identity, expires_s = self._verify_with_any(token, [key for key in keys if _fits(key, header)])
        except (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise Unauthenticated(f"the token is not valid: {type(error).__name__}") from None
        if len(self._verified) >= _MAX_CACHED:
            self._verified.clear()
        self._verified[digest] = identity, expires_s
        return identity

    def _use(self, keys: TokenKeys) -> None:
        if keys is not self._keys:
            self._keys = keys
            self._verified.clear()

    def _find(self, header: dict[str, Any]) -> list[TokenKey]:
        """Returns the keys that can be those of a token."""
        key_id = header.get("kid")
        if key_id is None and len(self._keys) == 1:
            (keys,) = self._keys.values()
            return keys
        return self._keys.get(key_id, [])

    def _verify_with_any(self, token: str, keys: list[TokenKey]) -> tuple[Identity, float]:
        """Returns what `_verify` returns for the first key that has signed the token, or raises the last failure."""
        failure: Exception = Unauthenticated("the token's algorithm is not that of its key")
        for key in keys:
            try:
                return self._verify(token, key)
            except (jwt.InvalidSignatureError, jwt.InvalidKeyError, TypeError) as error:
                failure = error
        raise failure

    def _verify(self, token: str, key: TokenKey) -> tuple[Identity, float]:
        """Returns the identity and the time on time.time() until which it may be remembered."""
        settings = self._settings
        claims = jwt.decode(
            token,
            key.key,
            algorithms=list(settings.algorithms),
            audience=settings.audience,
            issuer=settings.issuer,
            leeway=_LEEWAY_S,
            options={"require": ["exp", "iss", "aud"]},
        )
        tenant = claims.get(settings.tenant_claim)
        if not is_name(tenant):
            raise Unauthenticated(f"the token's claim {settings.tenant_claim} is not a tenant")
        roles = _roles(claims.get(settings.role_claim))
        if not roles:
            raise Unauthenticated(f"the token's claim {settings.role_claim} has no role")
        # Issuers write subjects such as "auth0|5f7c"; the audit lines have to tell them apart.
        name = quote(claims.get("sub", ""), safe="@:/", errors="replace")[:_MAX_NAME] or "token"
        return Identity(name, str(tenant), roles), float(claims["exp"]) + _LEEWAY_S


def _fits(key: TokenKey, header: dict[str, Any]) -> bool:
    return key.algorithm in (None, header.get("alg"))


def _roles(claim: object) -> frozenset[Role]:
    values: Collection[object] = claim if isinstance(claim, list) else [claim]
    return frozenset(role for role in Role if role.value in values)
