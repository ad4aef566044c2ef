"""The settings by which both servers verify callers and report refusals."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from scheduler.identity.verifier import Verifier
from scheduler.servers.refusals import Refusals

if TYPE_CHECKING:
    from quire.tls import TlsFiles


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
