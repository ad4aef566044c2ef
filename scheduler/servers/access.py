"""The settings by which both servers verify callers and report refusals; it finds the clients of gateways, too."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc

from scheduler.identity.identity import PERMISSION_DENIED, UNAUTHENTICATED, Unauthenticated
from scheduler.identity.permissions import METHODS
from scheduler.identity.verifier import Verifier
from scheduler.servers.refusals import Refusals

if TYPE_CHECKING:
    from collections.abc import Iterable

    from quire.tls import TlsFiles
    from scheduler.identity.identity import Identity

MAX_AUTHORIZATION_BYTES = 8192
"""Size of the credentials of a gateway's client, as gRPC limits metadata."""

_GENERATE = METHODS["/quire.v1.Generation/Generate"]


class ClientRefused(Exception):
    """The client of a gateway may not generate.

    reason  see `Refusals.refused`
    """

    def __init__(self, reason: str, why: str) -> None:
        super().__init__(why)
        self.reason = reason

    @property
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode[self.reason.upper()]


@dataclass(frozen=True, slots=True)
class Access:
    """Says how callers are verified. The default is for loopback: no identity is configured, and no TLS.

    tls  the server's certificate; with `ca`, clients have to send a certificate, too. None: no TLS
    """

    verifier: Verifier = field(default_factory=Verifier)
    refusals: Refusals = field(default_factory=lambda: Refusals(lambda reason: None))
    tls: TlsFiles | None = None

    @property
    def requires_client_certificate(self) -> bool:
        return self.tls is not None and self.tls.ca is not None

    async def client(self, authorization: str) -> Identity:
        """Returns the client of a gateway that has these credentials, "" if none. Raises ClientRefused."""
        if len(authorization) > MAX_AUTHORIZATION_BYTES:
            raise ClientRefused(UNAUTHENTICATED, f"credentials have at most {MAX_AUTHORIZATION_BYTES} bytes")
        try:
            identity = await self.verifier.identify(authorization or None)
        except Unauthenticated as error:
            raise ClientRefused(error.reason, str(error)) from None
        return self._permitted(identity, "the client has no credentials")

    def certified_client(self, names: Iterable[str]) -> Identity:
        """Returns the client whose verified certificate has these names. Raises ClientRefused."""
        return self._permitted(self.verifier.by_certificate(names), "the certificate is not in the key file")

    def _permitted(self, identity: Identity | None, unknown: str) -> Identity:
        """Raises ClientRefused, with the message `unknown` if a client needs an identity and has none."""
        identity = identity or self.verifier.stranger
        if identity is None:
            raise ClientRefused(UNAUTHENTICATED, unknown)
        if not identity.may(_GENERATE):
            raise ClientRefused(PERMISSION_DENIED, f"{identity.name} may not generate")
        return identity


def authorization_in(metadata: Any) -> str | None:
    """Returns the credentials in the metadata of a call, None if it has none. If there are several, the first count."""
    return next((str(value) for key, value in metadata or () if key == "authorization"), None)
