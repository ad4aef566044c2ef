"""The salt of the prefix cache: tenants never share prefixes, so cached_tokens tells nothing about other tenants."""

from scheduler.core import DEFAULT_TENANT

SEPARATOR = b"\xff"
"""A byte that is in no UTF-8 text, so that no client can write the salt of another tenant."""


def tenant_salt(tenant: str, cache_salt: bytes) -> bytes:
    """Returns the salt of a request: its tenant's, and within it the client's. The default tenant adds nothing."""
    if tenant == DEFAULT_TENANT:
        return cache_salt
    return SEPARATOR + tenant.encode() + SEPARATOR + cache_salt
